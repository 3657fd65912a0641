"""Which faults end a run: failed peers, lost nodes, network partitions, sshd down."""

from __future__ import annotations

import json
import re
import time

import pytest

from tests.bed.bed import Bed, Node
from tests.e2e.cli import Cli, bed_job
from tests.e2e.drill import kill_container, kill_rank

pytestmark = [pytest.mark.bed, pytest.mark.timeout(400)]

STUBBORN = "trap 'echo no' TERM; echo here; i=0; while [ $i -lt 600 ]; do sleep 0.2; i=$((i+1)); done"


def ends(bed: Bed, node: Node) -> float | None:
    """Return when the node's container ended, by the clock that all nodes share; None while it runs."""
    run = "docker ps -aq --filter label=launcher.purpose=run"  # the master also has a lock of its port
    fields = bed.sh(node, f"{run} | xargs docker inspect -f '{{{{.State.Running}}}} {{{{.State.FinishedAt}}}}'").split()
    if fields[0] == "true":
        return None
    return float(bed.sh(node, f"date -d {fields[1]} +%s.%N"))


def test_an_attached_launcher_stops_a_failures_peers_within_15_s(bed_cli: Cli, bed: Bed) -> None:
    """The peer cannot detect the failure (no torchrun, no collective) and ignores SIGTERM."""
    command = ["sh", "-c", f'if [ "$RANK" = 1 ]; then sleep 3; echo broken; exit 3; fi; {STUBBORN}']
    failed = bed_cli("up", bed_cli.job("peers", **bed_job(run={"command": command})), code=1)
    result = bed_cli.result()
    first, last = sorted(node["finished"] for node in result["nodes"])
    print(f"the peer was stopped {last - first:.1f} s after the failure")
    assert last - first < 15
    assert (result["failure"]["node"], result["failure"]["exit_code"]) == ("node2", 3)
    assert "broken" in failed.stderr
    assert [node["victim"] for node in result["nodes"]] == [True, False]
    assert bed.wait_clean() == []


@pytest.mark.parametrize("kill", [pytest.param(kill_rank, marks=pytest.mark.slow), kill_container])
def test_a_dead_rank_ends_all_containers_without_the_launcher(bed_cli: Cli, bed: Bed, kill: object) -> None:
    bed_cli.program("steps.py")
    keys = bed_job(run={"script": "steps.py", "args": ["2000", "5", "0.1"]})
    bed_cli("up", "-d", bed_cli.job("alone", **keys))
    bed_cli.until_logged("step 3")
    broken = time.time()
    (kill_rank if kill is kill_rank else kill_container)(bed, bed.nodes[1])
    while None in (times := [ends(bed, node) for node in bed.nodes[:2]]):
        assert time.time() - broken < 60
    print(f"all containers ended {max(t for t in times if t) - broken:.1f} s after the kill, without a launcher")
    assert max(t for t in times if t) - broken < 15
    assert json.loads(bed_cli("status", "--json").stdout)["state"] == "failed"
    late = bed_cli("logs", "alone", code=1)
    assert "node2" in late.stderr
    bed_cli("down")
    assert bed.wait_clean() == []


def test_exhausted_restarts_end_the_run_with_its_first_failure(bed_cli: Cli, bed: Bed) -> None:
    command = ["sh", "-c", f'if [ "$RANK" = 1 ]; then sleep 1; echo broken; exit 3; fi; {STUBBORN}']
    bed_cli("up", bed_cli.job("used", **bed_job(run={"command": command}, restarts=2)), code=1)
    result = bed_cli.result()
    assert [node["restarts"] for node in result["nodes"]] == [0, 2]
    reasons = result["nodes"][1]["restarted"]
    assert [re.sub(r"after \d s", "after some seconds", reason) for reason in reasons] == (
        ["exit code 3 after some seconds"] * 2
    )
    assert result["failure"]["node"] == "node2"
    assert bed.wait_clean() == []


@pytest.mark.slow  # e2e/test_resume.py has it without torchrun
def test_a_new_run_can_resume_an_earlier_runs_checkpoints(bed_cli: Cli, bed: Bed) -> None:
    bed_cli.program("steps.py")
    keys = bed_job(run={"script": "steps.py", "args": ["12", "5", "0.05"]})
    job = bed_cli.job("first", **keys)
    bed_cli("up", job)
    bed_cli("down")
    done = bed_cli("up", job, "--resume", "first", "--set", "run.args=[17, 5, 0.05]")
    assert done.stdout.splitlines()[0] == "rank 0 begins after step 10"
    assert done.stdout.splitlines()[-1] == "rank 0 finished after step 17"
    first, second = [run.name for run in bed_cli.runs()]
    saved = bed.sh(bed.nodes[0], f"cat /home/trainer/.launcher/{first}/checkpoints/last.json")
    assert json.loads(saved) == {"step": 10}  # the earlier run's checkpoint is unchanged
    bed_cli("down", second)
    elsewhere = bed_cli("up", job, "--resume", second, "--nodes", "node2", "--set", "run.args=[19, 5, 0.05]")
    assert elsewhere.stdout.splitlines()[0] == "rank 0 begins after step 15"
    assert "node2: resumes from node1's checkpoints/last.json (" in elsewhere.stderr
    bed_cli("down")
    assert bed.wait_clean() == []
