"""The fault table, part 3: faults that end a run. The launcher reports the reason, and nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest

from tests.bed import faults
from tests.bed.bed import Bed, Node
from tests.e2e.cli import bed_job
from tests.e2e.figures import Figures
from tests.e2e.scene import AWAY, Scene, rows

pytestmark = [pytest.mark.bed, pytest.mark.timeout(500)]


@contextmanager
def gone(bed: Bed, nodes: tuple[Node, ...]) -> Iterator[None]:
    faults.power_off(nodes[-1])
    try:
        yield
    finally:
        faults.power_on(bed, nodes[-1])


@contextmanager
def full_disk(bed: Bed, nodes: tuple[Node, ...]) -> Iterator[None]:
    """Another program fills the disk with the output folders of the first node."""
    file = "/home/trainer/.launcher/filler"
    bed.sh(nodes[0], f"dd if=/dev/zero of={file} bs=1M 2>/dev/null || true")
    try:
        yield
    finally:
        bed.sh(nodes[0], f"rm -f {file}")


@dataclass(frozen=True)
class Final:
    """A permanent fault. failure: text in the result's failure; reported: text in the launcher's messages."""

    fault: Callable[[Bed, tuple[Node, ...]], AbstractContextManager[object]]
    code: int
    state: str
    failure: str
    reported: str


FINAL = {
    "a node is gone for good": Final(gone, 1, "failed", "stopped responding", AWAY),
    "no packets between two nodes for good": Final(
        lambda bed, nodes: faults.partition(bed, nodes[0], nodes[-1]),
        1,
        "failed",
        "communication with its peers timed out",
        "exited with code",
    ),
    "no packets to or from a node for good": Final(
        lambda bed, nodes: faults.isolated(bed, nodes[-1]), 1, "failed", "stopped responding", AWAY
    ),
    "the master's disk is full": Final(full_disk, 1, "failed", "disk is full", "exited with code"),
}


@rows(
    FINAL,
    four={"a node is gone for good", "no packets between two nodes for good"},
    everyday={"a node is gone for good"},  # test_resource_faults.py has a full disk, and out of memory
)
def test_the_run_ends_with_its_reason(scene: Scene, name: str) -> None:
    """The ranks' collectives time out after 20 s, as a rank cannot detect a lost peer otherwise."""
    final = FINAL[name]
    with faults.small_disk(scene.bed, scene.nodes[0], "/home/trainer/.launcher", "16m"):
        drill = scene.begin("ends", steps=3000, peer_timeout=20)
        broken = time.monotonic()
        with final.fault(scene.bed, scene.nodes):
            over = drill.end(final.code) - broken
        reported = drill.first(final.reported, broken)
        result = scene.cli.result()
        failure = result["failure"]
        print(f"{failure['node']} {failure['what']} -> {failure['cure']}")
        assert result["state"] == final.state
        assert final.failure in failure["what"]
        assert reported is not None, str(drill)
        wrong = 0 if final.reported is AWAY else drill.lines_lost(scene.bed, scene.count)
        outcome = f"{final.state}, exit {final.code}"
        Figures(name, scene.count, outcome, reported, over, 0, wrong, scene.clean()).publish()
    assert wrong == 0


@pytest.mark.parametrize("scene", [pytest.param(2, marks=pytest.mark.slow)], indirect=True)
def test_out_of_memory_without_restarts_ends_the_run_with_that_reason(scene: Scene) -> None:
    drill = scene.begin("hoards", variables={"HOARD": "1:40"}, resources={"memory": "1500m"})
    broken = drill.sees("^step 39$")
    over = drill.end(1) - broken
    failure = scene.cli.result()["failure"]
    assert failure["node"] == "node2"
    assert "out of memory" in failure["what"]
    reported = drill.first("exited with code", broken)
    wrong = drill.lines_lost(scene.bed, scene.count)
    Figures("out of memory", 2, "failed, exit 1", reported, over, 0, wrong, scene.clean()).publish()
    assert wrong == 0


@pytest.mark.slow  # test_nodes_refused.py has it without figures
@pytest.mark.parametrize("scene", [2, 4], indirect=True)
def test_the_masters_port_is_taken(scene: Scene) -> None:
    """Another program already listens on the port when the launcher checks it."""
    taken = "import socket, time; s = socket.create_server(('', 29500)); time.sleep(600)"
    squatter = ["run", "-d", "--name", "squatter", "--network", "host", "launcher-bed-train", "python3", "-c", taken]
    scene.bed.docker(scene.nodes[0], *squatter)
    listens = "for i in $(seq 300); do grep -qE ':733C [0-9A-F:]+ 0A' /proc/net/tcp && exit; sleep 0.1; done; exit 1"
    scene.bed.sh(scene.nodes[0], listens, timeout=90)  # 733C is 29500
    scene.cli.program("steps.py")
    nodes = [node.alias for node in scene.nodes]
    keys = bed_job(run={"script": "steps.py", "args": ["3", "5", "0.1"]}, nodes=nodes, port=29500)
    started = time.monotonic()
    try:
        refused = scene.cli("up", scene.cli.job("taken", **keys), code=3)
    finally:
        scene.bed.docker(scene.nodes[0], "rm", "-f", "squatter")
    took = time.monotonic() - started
    assert "rendezvous port 29500 is in use" in refused.stderr
    assert "--set port=" in refused.stderr
    left = scene.bed.wait_clean(scene.nodes, home=True)
    Figures("the master's port is taken", scene.count, "refused, exit 3", took, None, 0, 0, len(left)).publish()
    assert left == []
