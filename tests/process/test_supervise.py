"""How the peers of a failed node are stopped: nodes on this machine, one of which goes away and comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import NodeUnreachable
from launcher.model.container import ContainerState, Phase
from launcher.node.connect import LOCAL, Fleet
from launcher.node.files import Files
from launcher.node.process.engine import ProcessEngine
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record, read_json_lines
from launcher.run.locate import Attached
from launcher.run.watch import observed, supervise
from launcher.run.watch.supervise import Supervision

RUN = "job-20260101-000000-abcd"


class Peer(ProcessEngine):
    """The container of `local-1`: it is away once it was asked to stop, and then back; it ends when `ended` is set."""

    def __init__(self, stop: Callable[[Peer], None]) -> None:
        super().__init__("local-1")
        self.stops = 0
        self.stopping, self.ended = threading.Event(), threading.Event()
        self._stop, self._was_away = stop, False

    def wait(self, container: str, timeout: float) -> ContainerState:
        if not self.stopping.wait(timeout):
            return state(container, None)
        if not self._was_away:
            self._was_away = True
            raise NodeUnreachable("local-1", "is cut off", "wait")
        return state(container, 143 if self.ended.wait(timeout) else None)

    def signal(self, container: str, name: str) -> None:
        return

    def stop(self, container: str, grace: float) -> ContainerState:
        self.stops += 1
        self.stopping.set()
        self._stop(self)
        return state(container, 143)


class Failed(ProcessEngine):
    """The container of `local-0`, which has failed."""

    def wait(self, container: str, timeout: float) -> ContainerState:
        return state(container, 1)


def state(container: str, code: int | None) -> ContainerState:
    return ContainerState(container, container, "", {}, Phase.RUNNING if code is None else Phase.EXITED, code)


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Peer], Supervision]:
    for module, limit in ((observed, "PEER_TIMEOUT"), (observed, "RETRY"), (supervise, "STACKS")):
        monkeypatch.setattr(module, limit, 0.01)

    def begin(peer: Peer) -> Supervision:
        output = str(tmp_path / "out")
        nodes = tuple(NodeOfRun(f"local-{n}", LOCAL, n, f"{RUN}-{n}", output, range(n, n + 1)) for n in range(2))
        record = Record.rebuild(RUN, "process", nodes, tmp_path / "runs")
        engines = {"local-0": Failed("local-0"), "local-1": peer}
        return Supervision(Attached(record, nodes, engines, Fleet([*engines.values()], {}, None)), (), resumed=False)

    return begin


def until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_every_attempt_to_stop_a_peer_is_waited_for(supervised: Callable[[Peer], Supervision], tmp_path: Path) -> None:
    first_may_end = threading.Event()

    def stop(peer: Peer) -> None:
        if peer.stops == 1:
            first_may_end.wait(60)
        else:
            peer.ended.set()

    run = supervised(Peer(stop))
    reading = threading.Thread(target=lambda: [*run.messages()], daemon=True)
    reading.start()
    until(lambda: run.all_ended)
    reading.join(1)  # without the first one, it ends at once
    assert reading.is_alive()
    first_may_end.set()
    reading.join(60)
    events = [each["event"] for each in read_json_lines(tmp_path / "runs" / RUN / "events.jsonl")]
    assert events.count("peer stopped") == 2
    assert {"node ended", "node lost", "node back"} <= {*events}


def test_an_error_while_peers_are_stopped_is_said_and_costs_no_outcome(
    supervised: Callable[[Peer], Supervision],
) -> None:
    def stop(peer: Peer) -> None:
        peer.ended.set()
        raise OSError(5, "Input/output error", "x")

    run = supervised(Peer(stop))
    assert [*run.messages()]
    outcome, _, problems = run.record_outcome()
    assert outcome.state.value == "failed"
    assert "peers were not stopped: Input/output error: x" in problems


def reach_budget(folder: Path) -> None:
    attempts = Path(NodePaths(str(folder / "out"), "local-0").attempts)
    attempts.parent.mkdir(parents=True)
    attempts.write_text("start 1\nbudget 2\nexit 0 3\n")


def test_an_error_while_nodes_are_told_of_the_budget_is_said(
    supervised: Callable[[Peer], Supervision], tmp_path: Path
) -> None:
    class Unwritable(Files):
        def append(self, *_: object, **__: object) -> None:
            raise OSError(5, "Input/output error", "x")

    reach_budget(tmp_path)
    peer = Peer(lambda peer: None)  # whether it is stopped before the budget is read: it goes on
    peer.files = Unwritable(peer.machine)
    run = supervised(peer)
    reading = threading.Thread(target=lambda: [*run.messages()], daemon=True)
    reading.start()
    try:
        until(lambda: bool(run._problems))  # noqa: SLF001 - before the outcome they are nowhere else
    finally:
        peer.stopping.set()
        peer.ended.set()
        reading.join(60)
    told = "not all nodes were told that the run has reached its budget: Input/output error: x"
    assert told in run.record_outcome()[2]


def test_a_node_that_cannot_be_told_of_the_budget_is_noted_once(
    supervised: Callable[[Peer], Supervision], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[object]()

    class CutOff(Files):
        def append(self, *args: object, **_: object) -> None:
            tries.append(args)
            raise NodeUnreachable("local-1", "is cut off", "wait")

    monkeypatch.setattr(supervise, "TELL", 0.01)
    reach_budget(tmp_path)
    peer = Peer(lambda peer: None)
    peer.files = CutOff(peer.machine)
    run = supervised(peer)
    reading = threading.Thread(target=lambda: [*run.messages()], daemon=True)
    reading.start()
    try:
        until(lambda: len(tries) > 2)
    finally:
        peer.stopping.set()
        peer.ended.set()
        reading.join(60)
    events = read_json_lines(tmp_path / "runs" / RUN / "events.jsonl")
    (noted,) = (each for each in events if each["event"] == "not told of the budget")
    assert noted["node"] == "local-1"
    assert "is cut off" in noted["reason"]
