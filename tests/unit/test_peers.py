"""When a run is decided and which peers are stopped, whatever messages there are; of real runs: test_observed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from launcher.model.container import ContainerState, Phase
from launcher.run.watch import messages
from launcher.run.watch.attempts import World
from launcher.run.watch.messages import Message
from launcher.run.watch.peers import DONE_TIMEOUT, PEER_TIMEOUT, Supervised, reduce, to_stop

NODES = ("a", "b", "c")


def state(code: int | None) -> ContainerState:
    return ContainerState("", "", "", {}, Phase.EXITED, exit_code=code)


node = st.sampled_from(NODES)
ends = st.builds(messages.NodeEnded, node, st.sampled_from([0, 1, 137, None]).map(state))
ENDS = (messages.NodeEnded, messages.NodeGone, messages.NodeRemoved)
MESSAGES = st.one_of(
    ends,
    st.builds(messages.NodeGone, node, st.just("is away"), st.just(1.0)),
    st.builds(messages.NodeRemoved, node),
    st.builds(messages.NodeStopped, node, st.sampled_from(["me@here", "you@there"])),
    st.builds(messages.NodeOver, node, st.just("the same error")),
    st.builds(messages.NodeLost, node, st.just("is away"), st.just(1.0)),
    st.builds(messages.NodeBack, node),
    st.builds(messages.NodeRestarted, node, st.just(1), st.just("exit code 1")),
    st.builds(lambda name: messages.RankZeroMoved(name, World(1, 0, NODES, "rank 0")), node),
    st.builds(messages.Tick),
)


@given(st.lists(MESSAGES, max_size=20), st.integers(0, 2), st.sets(node))
def test_whatever_happens_only_nodes_that_may_still_run_are_stopped(
    found: list[Message], may_lose: int, left_out: set[str]
) -> None:
    known, running = Supervised(NODES, may_lose=may_lose), 0
    for message in found:
        if isinstance(message, ENDS) and message.node in {*known.ended, *known.missing}:
            continue  # nobody waits for a node that has ended
        before = known
        known, stop = reduce(known, message)
        assert known.decided or not before.decided  # once decided, it stays so
        running = 0 if isinstance(message, messages.NodeBack) else running
        running += stop is not None
        assert running <= 1  # twice only if a node came back
        assert stop is None or (stop.after == PEER_TIMEOUT if known.failed else stop.after == DONE_TIMEOUT)
        assert known.stopping == (known.failed or known.done)
        chosen = to_stop(known, left_out)
        assert not {*chosen} & {*known.ended}
        assert not known.done or {*chosen} <= left_out
        assert not chosen or known.stopped_by is None


def test_a_failure_of_one_more_node_than_the_run_can_lose_decides_it() -> None:
    known = Supervised(NODES, may_lose=1)
    known, stop = reduce(known, messages.NodeEnded("a", state(1)))
    assert (known.decided, stop) == (False, None)
    known, stop = reduce(known, messages.NodeGone("b", "is away", 1.0))
    assert known.failed
    assert stop is not None
    assert to_stop(known, ()) == ["b", "c"]  # b may still run


def test_a_node_that_was_away_when_the_run_failed_is_stopped_when_it_comes_back() -> None:
    known, first = reduce(Supervised(NODES), messages.NodeEnded("a", state(1)))
    known, second = reduce(known, messages.NodeLost("b", "is away", 1.0))
    known, third = reduce(known, messages.NodeBack("b"))
    assert (first, second, third) == (third, None, first)


def test_at_the_budget_no_exit_code_is_a_failure_and_no_node_is_killed() -> None:
    """A peer fails at once for lack of rank 0, which may be noticed before the budget is."""
    known, first = reduce(Supervised(NODES), messages.NodeEnded("b", state(1)))
    assert first is not None
    known, _ = reduce(known, messages.NodeBudget("a"))
    assert to_stop(known, ()) == ()
    known, second = reduce(replace(known, stopping=False), messages.NodeEnded("c", state(137)))
    assert second is None
    assert not known.decided


def test_a_user_who_stops_a_run_is_the_first_one_and_no_peer_is_killed() -> None:
    known = replace(Supervised(NODES), ended={"a": state(143)})
    for by in ("me@here", "you@there"):
        known, _ = reduce(known, messages.NodeStopped("a", by))
    assert known.stopped_by == "me@here"
    assert to_stop(known, NODES) == ()
