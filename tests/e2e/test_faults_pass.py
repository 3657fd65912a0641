"""The fault table, part 2: temporary faults. The run waits, or is not affected, and continues."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest

from tests.bed import faults
from tests.bed.bed import Bed, Node
from tests.e2e.cli import bed_job
from tests.e2e.drill import Drill
from tests.e2e.figures import Figures
from tests.e2e.scene import AWAY, Scene, rows

pytestmark = [pytest.mark.bed, pytest.mark.timeout(500)]


@dataclass(frozen=True)
class Passing:
    """A fault of some seconds. reported: the launcher's message about it; "": none required."""

    fault: Callable[[Bed, tuple[Node, ...]], AbstractContextManager[object]]
    seconds: float
    steps: int
    reported: str = ""


@contextmanager
def an_hour_ahead(bed: Bed, nodes: tuple[Node, ...]) -> Iterator[None]:
    """Replace `date`, with which the launcher reads a node's clock."""
    stub = '#!/bin/sh\\nexec /bin/date -d "+1 hour" "$@"\\n'
    bed.sh(nodes[-1], f"printf '{stub}' > /usr/local/bin/date; chmod 755 /usr/local/bin/date")
    try:
        yield
    finally:
        bed.sh(nodes[-1], "rm /usr/local/bin/date")


PASSING = {
    "a node is paused for 60 s": Passing(lambda _, nodes: faults.paused(nodes[-1]), 60, 60, AWAY),
    "the master is paused for 60 s": Passing(lambda _, nodes: faults.paused(nodes[0]), 60, 60, AWAY),
    "no packets between two nodes for 30 s": Passing(
        lambda bed, nodes: faults.partition(bed, nodes[0], nodes[-1]), 30, 60
    ),
    "no packets to or from the master for 30 s": Passing(lambda bed, nodes: faults.isolated(bed, nodes[0]), 30, 60),
    "5 % of all packets to a node are lost for 30 s": Passing(
        lambda bed, nodes: faults.packet_loss(bed, nodes[-1], 0.05), 30, 600
    ),
    "no sshd for 60 s": Passing(lambda bed, nodes: faults.without_sshd(bed, nodes[0]), 60, 1200, AWAY),
}


@rows(
    PASSING,
    four={"a node is paused for 60 s", "no packets between two nodes for 30 s", "no sshd for 60 s"},
    everyday={"no packets between two nodes for 30 s"},
)
def test_the_run_waits_and_resumes(scene: Scene, name: str) -> None:
    """The time limit of the ranks' collectives is longer than the fault, as by default."""
    passing = PASSING[name]
    drill = scene.begin("waits", steps=passing.steps, peer_timeout=300)
    broken = time.monotonic()
    with passing.fault(scene.bed, scene.nodes):
        time.sleep(passing.seconds)
        assert drill.process.poll() is None, f"the run ended during the fault:\n{drill}"
    healed = time.monotonic()
    resumed = drill.sees("^step ", after=healed) - healed
    drill.end(0)
    reported = drill.first(AWAY, broken)
    if passing.reported:
        assert reported is not None, str(drill)
        assert drill.first("connected again", broken) is not None, str(drill)
    assert [step for _, step in drill.steps] == list(range(1, passing.steps + 1))
    assert [node["restarts"] for node in scene.cli.result()["nodes"]] == [0] * scene.count
    wrong = drill.lines_lost(scene.bed, scene.count)
    Figures(name, scene.count, "done, no restart", reported, resumed, 0, wrong, scene.clean()).publish()
    assert wrong == 0


@pytest.mark.parametrize("scene", [2, pytest.param(4, marks=pytest.mark.slow)], indirect=True)
def test_a_clock_that_is_an_hour_off_is_reported_and_harmless(scene: Scene) -> None:
    called = time.monotonic()
    with an_hour_ahead(scene.bed, scene.nodes):
        program = "for step in $(seq 30); do echo step $step; sleep 0.1; done"
        keys = {"run": {"command": ["sh", "-c", program]}, "nodes": [node.alias for node in scene.nodes]}
        drill = Drill.follow(scene.cli, "up", scene.cli.job("clock", **bed_job(**keys)))
        drill.end(0)
    reported = drill.first(f"{scene.nodes[-1].alias}: the clock is off by .3600 s", called)
    assert reported is not None, str(drill)
    assert [step for _, step in drill.steps] == list(range(1, 31))
    wrong = drill.lines_lost(scene.bed, scene.count)
    name = "a node's clock is an hour ahead"
    Figures(name, scene.count, "done, no restart", reported, None, 0, wrong, scene.clean()).publish()
    assert wrong == 0


@pytest.mark.parametrize("scene", [pytest.param(n, marks=pytest.mark.slow) for n in (2, 4)], indirect=True)
def test_the_run_continues_without_the_launcher_and_is_found_again(scene: Scene) -> None:
    first = scene.begin("orphan", steps=300)
    first.stop()
    killed = time.monotonic()
    assert json.loads(scene.cli("status", "--json").stdout)["state"] == "running"
    reported = time.monotonic() - killed
    drill = Drill.follow(scene.cli, "logs")
    resumed = drill.sees("^step 24$") - killed
    drill.end(0)
    assert [step for _, step in drill.steps] == list(range(1, 301))
    wrong = drill.lines_lost(scene.bed, scene.count)
    Figures(
        "the launcher is killed", scene.count, "done, no restart", reported, resumed, 0, wrong, scene.clean()
    ).publish()
    assert wrong == 0
