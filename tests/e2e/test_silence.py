"""Nodes that do not respond: the launcher keeps retrying, and neither stops nor removes anything."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.bed import faults
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job
from tests.e2e.drill import Drill, output_folder
from tests.e2e.figures import Figures
from tests.e2e.scene import AWAY

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]


def begin(cli: Cli, seconds: int) -> Drill:
    ticks = f"i=0; while [ $i -lt {seconds} ]; do i=$((i+1)); echo tick $i; sleep 1; done"
    job = cli.job("quiet", **bed_job(run={"command": ["sh", "-c", ticks]}, nodes=["node1"]))
    drill = Drill.follow(cli, "up", job)
    drill.sees("^tick 2$")
    return drill


@pytest.mark.slow
def test_a_run_continues_while_its_only_node_is_silent(bed_cli: Cli, bed: Bed) -> None:
    """It is silent for longer than the launcher waits for a node after a failure on another node."""
    drill = begin(bed_cli, 150)
    silent = time.monotonic()
    with faults.blocked_port(bed, bed.nodes[0], 22):
        time.sleep(100)
        assert drill.process.poll() is None, str(drill)
    healed = time.monotonic()
    back = drill.sees("node1: connected again") - healed
    said = drill.first(AWAY, silent)
    assert said is not None, str(drill)
    drill.end(0)
    assert [line for _, line in drill.lines] == [f"tick {i}" for i in range(1, 151)]
    wrong = drill.lines_lost(bed, 1)
    bed_cli("down")
    name = "port 22 of the only node is closed for 100 s"
    Figures(name, 1, "done, no restart", said, back, 0, wrong, len(bed.wait_clean())).publish()
    assert wrong == 0


def test_a_node_that_is_back_after_the_run_failed_elsewhere_is_stopped(bed_cli: Cli, bed: Bed) -> None:
    fails = "while [ ! -e /output/fail ]; do sleep 0.2; done; echo broken; exit 3"
    command = ["sh", "-c", f'echo begun; [ "$RANK" != 0 ] || {{ {fails}; }}; while :; do sleep 0.2; done']
    drill = Drill.follow(bed_cli, "up", bed_cli.job("halves", **bed_job(run={"command": command})))
    drill.sees("^begun$")
    with faults.without_sshd(bed, bed.nodes[1]):
        drill.sees(f"node2: {AWAY}")
        bed.sh(bed.nodes[0], f"touch {output_folder(bed_cli)}/fail")
        drill.sees("node1 exited with code 3")
        time.sleep(5)  # its peer cannot be stopped yet
        assert drill.process.poll() is None, str(drill)
    healed = time.monotonic()
    drill.sees("node2: connected again")
    assert drill.end(1) - healed < 40
    result = bed_cli.result()
    assert (result["failure"]["node"], result["failure"]["exit_code"]) == ("node1", 3)
    assert result["nodes"][1]["exit_code"] in (137, 143)
    assert result["nodes"][1]["victim"]
    bed_cli("down")
    assert bed.wait_clean() == []


def test_detaching_from_a_silent_node_warns_and_commands_trust_the_node_when_it_is_back(bed_cli: Cli, bed: Bed) -> None:
    drill = begin(bed_cli, 600)
    run = bed_cli.runs()[-1].name
    with faults.without_sshd(bed, bed.nodes[0]):
        drill.sees(AWAY)
        drill.process.send_signal(signal.SIGINT)
        drill.end(3)
        assert any("node1: no answer since" in line for _, line in drill.messages), str(drill)
        assert json.loads(bed_cli("runs", "--json").stdout)[0]["state"] == "unreachable"
        assert json.loads(bed_cli("status", "--json", code=3).stdout)["state"] == "unreachable"
    (bed_cli.runs()[-1] / "result.json").write_text(json.dumps({"run": run, "state": "lost", "exit_code": 3}))
    assert json.loads(bed_cli("runs", "--json").stdout)[0]["state"] == "running"
    assert json.loads(bed_cli("status", "--json").stdout)["state"] == "running"
    again = Drill.follow(bed_cli, "logs")
    again.sees("^tick 2$")
    again.stop()
    bed_cli("down")
    assert json.loads(bed_cli("runs", "--json").stdout)[0]["state"] == "stopped"
    assert bed.wait_clean() == []


def test_a_second_ctrl_c_stops_the_other_nodes_while_one_is_silent(bed_cli: Cli, bed: Bed) -> None:
    command = ["sh", "-c", "echo here; exec sleep 600"]
    drill = Drill.follow(bed_cli, "up", bed_cli.job("silent", **bed_job(run={"command": command})))
    drill.sees("^here$")
    with faults.without_sshd(bed, bed.nodes[1]):
        drill.sees(f"node2: {AWAY}")
        drill.process.send_signal(signal.SIGINT)
        drill.sees("Ctrl-C again")
        drill.process.send_signal(signal.SIGINT)
        drill.end(6)
        assert "not every node confirmed" in str(drill)
        assert any(line.startswith("node2: ") for _, line in drill.messages), str(drill)
        assert bed.docker(bed.nodes[0], "ps", "-aq") == ""
        seen = json.loads(bed_cli("status", "--json", code=3).stdout)["nodes"]
        assert [(node["node"], node["state"]) for node in seen] == [("node1", "removed"), ("node2", "unreachable")]
    bed_cli("down")
    assert bed.wait_clean() == []
