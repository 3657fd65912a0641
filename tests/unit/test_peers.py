"""When a run is decided and which peers are stopped, whatever happens; of recorded runs: test_observed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import NodeUnreachable
from launcher.model.container import ContainerState, Phase
from launcher.run.watch import messages, observed
from launcher.run.watch.messages import Message
from launcher.run.watch.observed import (
    DONE_TIMEOUT,
    PEER_TIMEOUT,
    Action,
    Moment,
    Observed,
    StopPeers,
    TellBudget,
    next_wait,
    peers_to_stop,
    reduce,
)
from launcher.run.watch.reader import Appended, ContainerRemoved, Event, StateSeen, WaitFailed
from tests.unit.traces import OUT, of_run

NODES = ("a", "b", "c")
STOP = StopPeers(PEER_TIMEOUT)


def begun(may_lose: int = 0) -> Observed:
    nodes = [of_run(name, rank) for rank, name in enumerate(NODES)]
    return observed.begin(
        "job-20260101-000000-abcd", nodes, (), Moment(0, 0), elastic=may_lose > 0, isolates=True, may_lose=may_lose
    )


def ended(name: str, code: int | None) -> StateSeen:
    return StateSeen(name, ContainerState("", "", "", {}, Phase.EXITED, exit_code=code))


def running(name: str) -> StateSeen:
    return StateSeen(name, ContainerState("", "", "", {}, Phase.RUNNING))


def away(name: str) -> WaitFailed:
    return WaitFailed(name, NodeUnreachable(name, "is away", "wait"))


def noted(name: str, line: str) -> Appended:
    """In its attempts file."""
    return Appended(name, f"{OUT}/state/{name}.attempts", 0, f"{line}\n".encode())


def after(known: Observed, *events: Event) -> tuple[Observed, list[Message], list[Action]]:
    said, actions = list[Message](), list[Action]()
    for at, event in enumerate(events):
        known, found, then = reduce(known, event, Moment(at, at))
        said += found
        actions += then
    return known, said, actions


node = st.sampled_from(NODES)
LINES = ("start 1", "stopped me@here 2", "over the same error", "budget 3", "generation 1 0 a,b,c rank 0 here")
EVENTS = st.one_of(
    st.builds(ended, node, st.sampled_from([0, 1, 137, None])),
    st.builds(running, node),
    st.builds(away, node),
    st.builds(ContainerRemoved, node),
    st.builds(noted, node, st.sampled_from([*LINES, "generation 2 0 b,c rank 0 here"])),
)


@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 1.0, 40.0])), max_size=30), st.integers(0, 2))
def test_whatever_happens_only_nodes_that_may_still_run_are_stopped(
    found: Sequence[tuple[Event, float]], may_lose: int
) -> None:
    known, at, due = begun(may_lose), 0.0, 0
    for event, step in found:
        at += step
        if not isinstance(event, Appended) and next_wait(known.nodes[event.node], 30.0) is None:
            continue  # nobody waits for a node that has ended
        before = known
        known, said, actions = reduce(known, event, Moment(at, at))
        assert known.decided == min(before.decided, at) or not decided(known)
        assert known.decided == before.decided or decided(known)
        due = 0 if any(isinstance(message, messages.NodeBack) for message in said) else due
        stops = [action for action in actions if isinstance(action, StopPeers)]
        due += len(stops)
        assert due <= 1  # twice only if a node came back
        assert stops in ([], [StopPeers(PEER_TIMEOUT if known.failed else DONE_TIMEOUT)])
        assert due or not (known.failed or known.finished_on_a_node)
        chosen, generations = peers_to_stop(known), [each.generation for each in known.nodes.values()]
        assert not {*chosen} & {*known.states}
        assert not known.finished_on_a_node or all(known.nodes[name].generation < max(generations) for name in chosen)
        assert not chosen or known.stopped_by is None


def decided(known: Observed) -> bool:
    return known.failed or known.finished_on_a_node or known.stopped_by is not None


def test_a_run_is_decided_when_its_first_node_fails() -> None:
    known, _, actions = after(begun(), running("a"), running("b"))
    assert (known.decided, actions) == (math.inf, [])
    known, _, actions = reduce(known, ended("b", 1), Moment(7, 7))
    assert (known.decided, actions) == (7, [STOP])
    known, _, actions = reduce(known, ended("c", 1), Moment(8, 8))
    assert (known.decided, actions) == (7, [])


def test_a_failure_of_one_more_node_than_the_run_can_lose_decides_it() -> None:
    known, _, actions = after(begun(may_lose=1), ended("a", 1))
    assert (known.failed, actions) == (False, [])
    known, _, actions = after(known, ContainerRemoved("b"))
    assert known.failed
    assert actions == [STOP]
    assert peers_to_stop(known) == ["b", "c"]  # b may still run


def test_a_node_that_was_away_when_the_run_failed_is_stopped_when_it_comes_back() -> None:
    known, said, actions = after(begun(), ended("a", 1), away("b"), running("b"))
    assert [type(each) for each in said] == [messages.NodeEnded, messages.NodeAway, messages.NodeBack]
    assert actions == [STOP, STOP]
    assert peers_to_stop(known) == ["b", "c"]


def test_a_run_that_is_done_stops_only_nodes_that_it_has_left_out() -> None:
    known, _, actions = after(
        begun(may_lose=1),
        *(noted(name, LINES[-1]) for name in NODES),
        *(noted(name, "generation 2 0 b,c rank 0 here") for name in "bc"),
        ended("b", 0),
    )
    assert (known.finished_on_a_node, actions, peers_to_stop(known)) == (True, [StopPeers(DONE_TIMEOUT)], ["a"])
    assert peers_to_stop(after(known, away("a"))[0]) == []


def test_at_the_budget_no_exit_code_is_a_failure_and_no_node_is_killed() -> None:
    """A peer fails at once for lack of rank 0, which may be noticed before the budget is."""
    known, _, actions = after(begun(), ended("b", 1), noted("a", "budget 3"), noted("a", "exit 0 4"))
    assert actions == [STOP, TellBudget()]
    assert (known.failed, peers_to_stop(known)) == (False, ())
    known, said, actions = after(known, away("a"), running("a"), ended("c", 1))
    assert messages.NodeBack("a") in said
    assert (known.failed, actions) == (False, [])


def test_a_user_who_stops_a_run_is_the_first_one_and_no_peer_is_killed() -> None:
    known, said, _ = after(begun(), noted("a", "stopped me@here 1"), noted("b", "stopped you@there 2"), ended("a", 143))
    assert [each.by for each in said if isinstance(each, messages.NodeStopped)] == ["me@here", "you@there"]
    assert (known.stopped_by, known.decided, peers_to_stop(known)) == ("me@here", 0, ())
