"""What is known of followed nodes, said about them and done: against what was recorded of real runs, and any events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import LauncherError, NodeUnfit, NodeUnreachable, NoRoomHere
from launcher.model.container import ContainerState, Phase
from launcher.records.collect import Collected
from launcher.run.watch import attempts, messages, observed
from launcher.run.watch.attempts import Generation
from launcher.run.watch.messages import Message
from launcher.run.watch.observed import (
    GIVE_UP,
    REMOVAL,
    RETRY,
    RETRY_SELDOM,
    FilesCollected,
    Moment,
    Observed,
    RestFailed,
    RestRead,
    Shown,
    StartsKnown,
    StopPeers,
    next_wait,
    peers_to_stop,
    reduce,
    to_collect,
)
from launcher.run.watch.reader import Appended, ContainerRemoved, EngineLogged, Event, StateSeen, WaitFailed
from tests.unit import traces
from tests.unit.traces import OUT, RUN, of_run

AWAY = NodeUnreachable("a", "is away", "wait")


def to_the_hundredth(message: Message) -> Message:
    """Traces have the time of their start in milliseconds."""
    if isinstance(message, (messages.NodeAway, messages.NodeGivenUp)):
        return replace(message, since=round(message.since, 2))
    return message


def by_node(found: list[Message]) -> dict[str, list[Message]]:
    key: Callable[[Message], str] = lambda message: getattr(message, "node", "")  # noqa: E731
    return {name: list(each) for name, each in groupby(sorted(found, key=key), key)}


@pytest.mark.parametrize("name", traces.TRACES)
def test_a_recorded_run_is_reported_and_its_peers_are_stopped_as_they_were(name: str) -> None:
    """Each message of a node in order; between the nodes, threads took turns. Each action in order."""
    start, *found = traces.lines(name)
    known, said, recorded, due = traces.started(start), list[Message](), list[Message](), math.inf
    actions, taken, stopped = list[dict[str, Any]](), list[dict[str, Any]](), set[str]()
    for line in found:
        now = Moment(line["at"], line["clock"])
        if now.at >= due:
            due, stopped = math.inf, {*peers_to_stop(known)}
        if event := traces.event_of(line, known):
            before = known
            known, new, then = reduce(known, event, now)
            said += new
            actions += [{"action": "over"}] if known.decided < before.decided else []
            for action in then:
                actions.append(traces.line_of(action))
                due = now.at + action.after if isinstance(action, StopPeers) else due
        elif "message" in line:
            recorded.append(traces.message_of(line))
        elif "action" in line:
            taken.append({key: line[key] for key in line if key not in ("at", "clock", "signal")})
    assert by_node([*map(to_the_hundredth, said)]) == by_node([*map(to_the_hundredth, recorded)])
    assert actions == [each for each in taken if each["action"] != "stop"]
    assert stopped == {each["node"] for each in taken if each["action"] == "stop"}
    assert known.nothing_to_read == (name != "broken_off")


NODES = ("a", "b")
MEMBERS = st.sampled_from([("a", "b"), ("b", "a"), ("b",)])
WORLDS = st.builds(Generation, st.integers(1, 4), st.just(0), MEMBERS, st.just("rank 0 here"))
LINES = st.one_of(
    st.sampled_from([b"start 1\n", b"exit 1 2\n", b"stopped me@here 3\n", b"over the same error\n", b"other\n"]),
    WORLDS.map(lambda world: f"generation {world.number} 0 {','.join(world.members)} {world.text}\n".encode()),
)
STATES = st.builds(
    lambda phase, code, why: ContainerState("", "", "", {}, phase, exit_code=code, error=why),
    st.sampled_from([Phase.RUNNING, Phase.EXITED, Phase.RESTARTING]),
    st.sampled_from([None, 0, 1, 137]),
    st.sampled_from(["", "job 1: PENDING"]),
)
node = st.sampled_from(NODES)
FULL, UNFIT = NoRoomHere("here", "is full"), NodeUnfit("a", "no")
RESULTS = st.sampled_from([Collected(0), Collected(1), Collected(0, (FULL,)), AWAY, UNFIT])
EVENTS = st.one_of(
    st.builds(StateSeen, node, STATES),
    st.builds(ContainerRemoved, node),
    st.builds(WaitFailed, node, st.just(AWAY)),
    st.builds(RestFailed, node, st.sampled_from([AWAY, UNFIT])),
    st.builds(RestRead, node, st.booleans()),
    st.builds(EngineLogged, node, st.just(b"engine")),
    st.builds(StartsKnown, node, LINES),
    st.builds(lambda name, data: Appended(name, f"{OUT}/state/{name}.attempts", 0, data), node, LINES),
    st.builds(lambda name: Appended(name, f"{OUT}/logs/{name}.log", 0, b"line\n"), node),
    st.just("collect"),
)


def possible(known: Observed, event: Any, result: Collected | LauncherError) -> Event | FilesCollected | None:
    """What can happen now: nobody waits for a container that has ended, and what remains is read only once it has."""
    if event == "collect":
        names, final = to_collect(known)
        return FilesCollected(dict.fromkeys(names, result), final)
    if isinstance(event, (StateSeen, ContainerRemoved, WaitFailed)):
        return event if next_wait(known.nodes[event.node], 30.0) else None
    if isinstance(event, (RestFailed, RestRead)):
        there = known.nodes[event.node]
        return event if there.has_ended and not there.rest_read else None
    assert isinstance(event, Event)
    return event


STEPS = st.lists(st.tuples(EVENTS, RESULTS, st.sampled_from([0.0, 1.0, 40.0])), max_size=40)


@given(STEPS, st.booleans(), st.booleans())
def test_whatever_happens_each_thing_is_said_once(found: Any, elastic: bool, moves: bool) -> None:
    nodes = [of_run("a"), of_run("b", 1)]
    shown = [Shown(nodes[0], f"{OUT}/logs/a.log", moves=moves)]
    known, at, said = (
        observed.begin(RUN, nodes, shown, Moment(0, 0), elastic=elastic, isolates=True),
        0.0,
        list[Message](),
    )
    for event, result, step in found:
        at += step
        if event := possible(known, event, result):
            before = known
            known, new, _ = reduce(known, event, Moment(at, at))
            said += new
            assert not before.collected or known.collected
            assert known.generation >= before.generation
            assert sum(each.shown for each in known.nodes.values()) <= 1 or not moves
    for name, own in by_node(said).items():
        if not name:
            continue
        of_ends = (messages.NodeEnded, messages.NodeGivenUp, messages.NodeRemoved)
        ends = [each for each in own if isinstance(each, of_ends)]
        assert len(ends) == known.nodes[name].has_ended
        turns = [type(each) for each in own if type(each) in (messages.NodeAway, messages.NodeBack)]
        assert turns == [(messages.NodeAway, messages.NodeBack)[number % 2] for number in range(len(turns))]
        assert known.nodes[name].away == len(turns) % 2
        for once in (messages.NodeStopped, messages.NodeOver):
            assert sum(isinstance(each, once) for each in own) <= 1
        assert not elastic or not any(isinstance(each, messages.NodeRestarted) for each in own)
    moved = [each.world.number for each in said if isinstance(each, messages.RankZeroMoved)]
    assert moved == sorted(set(moved))
    assert sum(isinstance(each, messages.NotCollected) for each in said) <= 2


def begun() -> Observed:
    nodes = [of_run("a"), of_run("b", 1)]
    return observed.begin(
        RUN, nodes, [Shown(nodes[0], f"{OUT}/logs/a.log")], Moment(0, 0), elastic=False, isolates=True
    )


def test_a_node_that_does_not_answer_is_asked_ever_less_often_and_forever() -> None:
    known, pauses, at = begun(), list[float](), 0.0
    for _ in range(2000):
        known, _, _ = reduce(known, WaitFailed("a", AWAY), Moment(at, at))
        pause, limit = next_wait(known.nodes["a"], 30.0) or (math.nan, math.nan)
        assert limit == 0
        at += pause
        pauses.append(pause)
    assert pauses[:5] == [RETRY, 2 * RETRY, 4 * RETRY, 8 * RETRY, RETRY_SELDOM]
    known, found, _ = reduce(known, StateSeen("a", ContainerState("", "", "", {}, Phase.RUNNING)), Moment(at, at))
    assert found == [messages.NodeBack("a")]
    assert next_wait(known.nodes["a"], 30.0) == (0, 30.0)


def test_a_node_that_is_away_is_given_up_only_after_the_run_is_decided() -> None:
    known, _, _ = reduce(begun(), WaitFailed("a", AWAY), Moment(0, 7))
    known, found, _ = reduce(known, WaitFailed("a", AWAY), Moment(10_000, 10_007))
    assert found == []
    failed = ContainerState("", "", "", {}, Phase.EXITED, exit_code=1)
    known, _, _ = reduce(known, StateSeen("b", failed), Moment(10_000, 0))
    known, found, _ = reduce(known, WaitFailed("a", AWAY), Moment(10_000 + GIVE_UP, 0))
    assert found == []
    known, found, _ = reduce(known, WaitFailed("a", AWAY), Moment(10_001 + GIVE_UP, 0))
    assert found == [messages.NodeGivenUp("a", str(AWAY), 0)]
    assert next_wait(known.nodes["a"], 30.0) is None
    assert known.nodes["a"].collected


def test_a_killed_container_is_asked_again_as_it_may_be_about_to_be_removed() -> None:
    killed = StateSeen("a", ContainerState("", "", "", {}, Phase.EXITED, exit_code=137))
    known, found, _ = reduce(begun(), killed, Moment(0, 0))
    assert found == []
    assert next_wait(known.nodes["a"], 30.0) == (REMOVAL, 0)
    assert reduce(known, ContainerRemoved("a"), Moment(1, 1))[1] == [messages.NodeRemoved("a")]
    assert reduce(known, killed, Moment(1, 1))[1] == [messages.NodeEnded("a", killed.state)]


def test_files_of_an_ended_node_are_collected_first_and_again_until_its_disk_answers() -> None:
    known, _, _ = reduce(begun(), WaitFailed("b", AWAY), Moment(0, 0))
    assert to_collect(known) == (["a"], False)
    known, _, _ = reduce(known, StateSeen("a", ContainerState("", "", "", {}, Phase.EXITED, exit_code=0)), Moment(1, 1))
    assert to_collect(known) == (["a"], True)
    unfit = NodeUnfit("a", "its disk does not answer")
    for at in (2, GIVE_UP):
        known, found, _ = reduce(known, FilesCollected({"a": unfit}, final=True), Moment(at, at))
        assert (to_collect(known), known.pause, found) == ((["a"], True), RETRY, [])
    known, _, _ = reduce(known, FilesCollected({"a": unfit}, final=True), Moment(2 + GIVE_UP, 0))
    assert to_collect(known) == ([], False)
    assert [*known.missed.values()] == [str(unfit)]


def test_how_the_gradients_travel_is_said_once() -> None:
    known, found, _ = reduce(
        begun(), FilesCollected({"a": Collected(1)}, final=False, gradients="over 25 GbE"), Moment(0, 0)
    )
    assert found == [messages.Gradients("over 25 GbE")]
    assert reduce(known, FilesCollected({}, final=False, gradients="over 25 GbE"), Moment(1, 1))[1] == []
    known, found, _ = reduce(known, FilesCollected({}, final=False, apart="each alone"), Moment(2, 2))
    assert found == [messages.Warned("each alone")]
    assert reduce(known, FilesCollected({}, final=False, apart="each alone"), Moment(3, 3))[1] == []


def test_a_breakpoint_on_a_node_whose_output_is_not_shown_is_said_once() -> None:
    lines = [
        b"start 1\nskips 1 7 5 a.py:1: nobody watches\n",
        b"skips 1 7 6 a.py:2: nobody watches\nwaits 1 7 6 b.py:1, breakpoint()\n",
        b"taken 1 7 7 b.py:1, breakpoint()\n",
        b"goes 1 7 8\n",
    ]
    known, said = begun(), list[list[str]]()
    for node in ("b", "a"):  # the output of a is shown
        for at, line in enumerate(lines):
            known, found, _ = reduce(known, Appended(node, f"{OUT}/state/{node}.attempts", 0, line), Moment(at, at))
            said.append([each.what for each in found if isinstance(each, messages.RankAtBreakpoint)])
    skips = [f"rank 1 on b skips breakpoint() in a.py:{line}: nobody watches" for line in (1, 2)]
    waits = f"rank 1 on b waits in b.py:1, breakpoint(): launcher debug {RUN} --rank 1"
    assert said == [[skips[0]], [waits, skips[1]], [], [], [], [], [], []]


def test_the_end_of_a_long_attempts_file_is_known() -> None:
    known, name = begun(), f"{OUT}/state/a.attempts"
    world = b"generation 2 0 a,b rank 0 here\n"
    for data in (world, b"start 1\n", b"other line\n" * (attempts.LIMIT // 11), b"start 2\n"):
        known, _, _ = reduce(known, Appended("a", name, 0, data), Moment(0, 0))
    seen = list[str]()
    for data in (b"stopped me@here 3\n", world.replace(b"2", b"3"), b"budget 4\n", b"line\n" * (attempts.LIMIT // 5)):
        known, found, _ = reduce(known, Appended("a", name, 0, data), Moment(1, 1))
        seen += [type(message).__name__ for message in found]
    assert [each for each in seen if each != "NodeRestarted"] == ["NodeStopped", "RankZeroMoved", "NodeBudget"]


def test_the_log_of_another_node_is_read_from_where_rank_0_came_to_it() -> None:
    nodes = [of_run("a"), of_run("b", 1)]
    shown = [Shown(nodes[0], f"{OUT}/logs/a.log", 5, moves=True)]
    known = observed.begin(RUN, nodes, shown, Moment(0, 0), elastic=True, isolates=True)
    assert known.nodes["a"].wanted().log == f"{OUT}/logs/a.log"
    line = b"generation 2 99 b,a rank 0 is now on b\n"
    known, found, _ = reduce(known, Appended("b", f"{OUT}/state/b.attempts", 0, line), Moment(0, 0))
    assert [type(message) for message in found] == [messages.RankZeroMoved]
    assert known.nodes["a"].wanted().log == ""
    wanted = known.nodes["b"].wanted()
    assert wanted.first_bytes[wanted.log] == 99
    assert f"{OUT}/generations/0002-0/metrics.jsonl" in wanted.first_bytes


def test_where_rank_0_moves_is_shown_once() -> None:
    nodes = [of_run("a"), of_run("b", 1)]
    moved = b"launcher: generation 3: rank 0 is now on a, world 2 of 3\n"
    own = b"launcher: generation 2: rank 0 is now on b, world 2 of 3: a lost at 12:03 UTC\n"

    def printed(data: bytes, *, moves: bool = True, away: bool = False) -> bytes:
        shown = [Shown(nodes[1], f"{OUT}/logs/b.log", 0, moves=moves)]
        known = observed.begin(RUN, nodes, shown, Moment(0, 0), elastic=True, isolates=True)
        events = [WaitFailed("a", NodeUnreachable("a", "is off", ""))] if away else []
        for event in (*events, Appended("b", f"{OUT}/logs/b.log", 0, data)):
            known, found, _ = reduce(known, event, Moment(0, 0))
        return b"".join(message.data for message in found if isinstance(message, messages.Output))

    assert printed(own + b"step 1\n" + moved + b"step 2\n") == own + b"step 1\nstep 2\n"
    assert printed(moved) == b""
    assert printed(moved, away=True) == moved, "nobody else says so"
    assert printed(moved, moves=False) == moved, "the log of one node is shown"
    elsewhere = moved.replace(b"on a,", b"on c,")
    assert printed(elsewhere) == elsewhere


def test_messages_are_recorded_under_names_that_stay() -> None:
    """Old and new records are read alike, whatever the classes are called."""
    assert {each.event for each in Message.__subclasses__()} == {
        "",  # output, progress, ticks
        *(
            "node ended",
            "node lost",
            "node back",
            "node gone",
            "node removed",
            "node stopped",
            "node budget",
            "node waits",
        ),
        *("node restarted", "node over", "rankatbreakpoint", "rankzeromoved", "gradients", "notcollected", "warned"),
    }
