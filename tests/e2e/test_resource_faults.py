"""Full disks and memory, ports in use, nodes that are unreachable during cleanup."""

from __future__ import annotations

import json
import time

import pytest

from tests.bed import faults
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]


def test_a_second_down_finishes_what_an_unreachable_node_missed(bed_cli: Cli, bed: Bed) -> None:
    bed_cli.program("ticks.py")
    bed_cli("up", "-d", bed_cli.job("away", **bed_job(run={"command": ["python3", "ticks.py", "3000"]})))
    faults.power_off(bed.nodes[1])
    try:
        began = time.monotonic()
        failed = bed_cli("down", code=6)
        print(f"exit 6 after {time.monotonic() - began:.1f} s")
        assert "node2" in failed.stderr
        assert "node1: launcher-away-" in failed.stderr
        assert bed.leftovers(bed.nodes[0]).lines(home=False) == []
        shown = json.loads(bed_cli("status", "--json", code=3).stdout)
        assert {row["node"]: row["state"] for row in shown["nodes"]} == {"node1": "removed", "node2": "unreachable"}
    finally:
        faults.power_on(bed, bed.nodes[1])
    assert len(bed.leftovers(bed.nodes[1]).containers) == 1
    bed_cli("down")
    assert bed.wait_clean() == []


def test_out_of_memory_is_reported(bed_cli: Cli, bed: Bed) -> None:
    program = "data = [bytearray(1 << 20) for _ in range(2000)]; print(len(data))"
    keys = bed_job(run={"command": ["python3", "-c", program]}, nodes=["node1"], resources={"memory": "200m"})
    failed = bed_cli("up", bed_cli.job("oom", **keys), code=1)
    assert "out of memory" in failed.stderr
    assert bed_cli.result()["nodes"][0]["oom_killed"]
    noted = (bed_cli.runs()[-1] / "state" / "node1.attempts").read_text()
    assert "\noom " in noted  # what Docker may have missed
    assert bed.wait_clean() == []


def test_a_full_disk_is_reported_and_leaves_nothing(bed_cli: Cli, bed: Bed) -> None:
    program = (
        "import os\n"
        "print('begins', flush=True)\n"
        "with open(os.environ['LAUNCHER_OUTPUT'] + '/big', 'wb') as file:\n"
        "    for _ in range(64):\n"
        "        file.write(bytes(1 << 20)); file.flush()\n"
    )
    keys = bed_job(run={"command": ["python3", "-c", program]}, nodes=["node1"])
    with faults.small_disk(bed, bed.nodes[0], "/home/trainer/.launcher", "16m"):
        failed = bed_cli("up", bed_cli.job("full", **keys), code=1)
    assert "the output folder's disk is full" in failed.stderr
    assert "launcher clean" in failed.stderr
    assert bed.wait_clean() == []


def test_the_masters_port_is_taken_between_check_and_start(bed_cli: Cli, bed: Bed) -> None:
    """The launcher's check cannot detect it: the program fails, and the cause is reported with a fix."""
    bed_cli.program("steps.py")
    # create_server: connections of the run before may still be in TIME_WAIT, which a plain bind() takes for in use
    taken = "import socket; s = socket.create_server(('', 29500)); "
    command = [
        "python3",
        "-c",
        taken + "import runpy, sys; sys.argv=['steps.py','3','5','0.1']; runpy.run_path('steps.py')",
    ]
    failed = bed_cli("up", bed_cli.job("taken", **bed_job(run={"command": command}, nodes=["node1"])), code=1)
    assert "the rendezvous port 29500 is in use" in failed.stderr
    assert "--set port=" in failed.stderr
    assert bed.wait_clean() == []
