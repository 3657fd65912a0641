"""`timeout` and `hang_timeout` end to end: enforced inside the containers and reported as such."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job
from tests.e2e.drill import Drill

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]


def _hangs(cli: Cli, rank: int) -> dict[str, Any]:
    cli.program("hangs.py")
    cli.program("sitecustomize.py")
    keys = bed_job(run={"script": "hangs.py", "args": [str(rank)]})
    keys["env"]["PYTHONPATH"] += ":."
    return keys


@pytest.mark.parametrize(
    "rank", [pytest.param(1, id="a-worker-lags", marks=pytest.mark.slow), pytest.param(0, id="the-master-lags")]
)
def test_a_hang_is_a_failure_that_names_the_lagging_rank_and_its_stack(bed_cli: Cli, bed: Bed, rank: int) -> None:
    job = bed_cli.job("hang", **_hangs(bed_cli, rank), hang_timeout="8s")
    drill = Drill.follow(bed_cli, "up", job)
    drill.sees("^step 3$")
    noticed = drill.sees("no output and no step for 8 s")
    over = drill.end(1) - noticed
    print(f"all ended {over:.1f} s after the hang was noticed")
    assert over < 120
    failure = bed_cli.result()["failure"]
    print(json.dumps(failure, indent=1))
    assert f"the others wait for rank {rank} on node{rank + 1} at all_reduce number 5, sizes [1]" in failure["what"]
    assert re.search(rf"rank {rank} is at hangs.py:\d+ in reads_data_forever", failure["what"])
    assert "reads_data_forever" in failure["words"]
    assert "all_reduce" in failure["words"]
    messages = [line for _, line in drill.messages]
    assert any("hung: no output" in line for line in messages)
    assert bed.wait_clean() == []


def test_a_hang_is_restarted_if_restarts_are_left(bed_cli: Cli, bed: Bed) -> None:
    command = [
        "sh",
        "-c",
        'echo here; [ -e "$LAUNCHER_OUTPUT/second" ] && exit 0; touch "$LAUNCHER_OUTPUT/second"; sleep 600',
    ]
    keys = bed_job(run={"command": command}, nodes=["node1"], hang_timeout="3s", restarts=1)
    bed_cli("up", bed_cli.job("again", **keys))
    assert bed_cli.result()["nodes"][0]["restarted"][0].startswith("exit code 125 (hung)")


def test_the_time_limit_holds_without_the_launcher(bed_cli: Cli, bed: Bed) -> None:
    keys = bed_job(run={"command": ["sleep", "600"]}, timeout="5s", restarts=3)
    began = time.monotonic()
    bed_cli("up", "-d", bed_cli.job("limit", **keys))
    while json.loads(bed_cli("status", "--json").stdout)["state"] in ("running", "restarting"):
        assert time.monotonic() - began < 120
        time.sleep(1)
    print(f"ended {time.monotonic() - began:.1f} s after `up` was called, limit 5 s")
    ended = bed_cli("logs", code=1)
    assert "reached the job's time limit" in ended.stderr
    bed_cli("down")
    assert bed.wait_clean() == []


@pytest.mark.slow
def test_a_stuck_worker_ends_after_its_master_without_the_launcher(bed_cli: Cli, bed: Bed) -> None:
    """The worker is not in a collective, so torch cannot end it; its stack is in its own log."""
    job = bed_cli.job("stuck", **_hangs(bed_cli, 1), hang_timeout="10s")
    bed_cli("up", "-d", job)
    bed_cli.until_logged("no output and no step for 10 s")
    noticed = time.monotonic()
    while json.loads(bed_cli("status", "--json").stdout)["state"] == "running":
        assert time.monotonic() - noticed < 120
        time.sleep(1)
    print(f"all ended {time.monotonic() - noticed:.1f} s after the hang was noticed, without a launcher")
    late = bed_cli("logs", code=1)
    assert "hung: no output and no step" in late.stderr
    worker = (bed_cli.runs()[-1] / "logs" / "node2.log").read_text()
    assert "the master exited, but this node is still running" in worker
    assert "reads_data_forever" in worker
    bed_cli("down")
    assert bed.wait_clean() == []
