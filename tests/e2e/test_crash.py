"""The launcher killed with -9 at every step of `up`: the next command shows the real state, and `down` removes all."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import ROOT, Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(200)]

# When it is killed, and the state that `status` then shows: None if no run has begun.
STEPS: dict[str, str | None] = {
    "after:connect:1": None,
    "after:facts:2": None,
    "after:probe-create:1": None,
    "before:probe-_remove:1": None,
    "after:granted_ulimits:2": None,
    "before:create:1": "removed",
    "after:create:1": "created",
    "after:put:1": "created",
    "after:put:2": "created",
    "before:wait:2": "created",  # the check of what was created, before anything starts
    "before:start:1": "created",
    "after:start:1": "running",
    "after:start:2": "running",
    "before:wait:4": "running",  # monitoring of the second node
}
EVERYDAY = {"after:probe-create:1", "after:start:1"}


@pytest.mark.parametrize(
    "when", [pytest.param(w, marks=[] if w in EVERYDAY else [pytest.mark.slow], id=w.replace(":", "-")) for w in STEPS]
)
def test_killed(bed_cli: Cli, bed: Bed, when: str) -> None:
    bed_cli.program("ticks.py")
    job = bed_cli.job("crash", **bed_job(run={"script": "ticks.py", "args": ["1000"]}))
    process = subprocess.run(
        [sys.executable, "-m", "tests.e2e.killed", when, "up", job],
        cwd=bed_cli.cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **bed_cli.env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == -9, process.stderr
    wanted = STEPS[when]
    assert bool(bed_cli.runs()) == (wanted is not None), process.stderr
    if wanted is None:
        assert bed.wait_clean(timeout=15, home=True) == []
        return
    assert json.loads(bed_cli("status", "--json").stdout)["state"] == wanted
    bed_cli("down", "--purge")
    assert bed.wait_clean(home=True) == []
    assert json.loads(bed_cli("status", "--json").stdout)["state"] == "stopped"
    bed_cli("up", job, "--set", "run.args=[3]")  # nothing blocks the next run
