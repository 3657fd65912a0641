"""The launcher is killed with SIGKILL at every step of `up`: `status` shows the actual state, `down` removes all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import ROOT, Cli, bed_job
from tests.e2e.killed import place

pytestmark = [pytest.mark.bed, pytest.mark.timeout(200)]

# The step at which it is killed, and the state that `status` then shows; None: no run was recorded.
STEPS: dict[str, str | None] = {
    "after:connect:1": None,
    "after:facts:2": None,
    "after:probe-create:1": None,
    "before:probe-remove:1": None,
    "after:granted_ulimits:2": None,
    "before:create:1": "removed",
    "after:create:1": "created",
    "after:put:1": "created",
    "after:put:2": "created",
    "after:claim:1": "created",  # the master's port
    "before:start:1": "created",
    "after:start:1": "running",
    "after:start:2": "running",
    "before:wait:2": "running",  # monitoring of the second node
}
EVERYDAY = {"after:probe-create:1", "after:start:1"}


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    """Empty: a step is a probe of the image."""
    return tmp_path / "cache"


def killed(cli: Cli, when: str, *args: object) -> str:
    """Run the launcher until it is killed at this step; return its stderr."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.e2e.killed", when, *map(str, args)],
        cwd=cli.cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **cli.env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == -9, process.stderr
    return process.stderr


@pytest.mark.parametrize(
    "when", [pytest.param(w, marks=[] if w in EVERYDAY else [pytest.mark.slow], id=w.replace(":", "-")) for w in STEPS]
)
def test_killed(bed_cli: Cli, bed: Bed, when: str) -> None:
    bed_cli.program("ticks.py")
    job = bed_cli.job("crash", **bed_job(run={"command": ["python3", "ticks.py", "1000"]}))
    messages = killed(bed_cli, when, "up", job)
    wanted = STEPS[when]
    assert bool(bed_cli.runs()) == (wanted is not None), messages
    if wanted is None:
        assert bed.wait_clean(timeout=60, home=True) == []
        return
    assert json.loads(bed_cli("status", "--json").stdout)["state"] == wanted
    bed_cli("down", "--purge")
    assert bed.wait_clean(home=True) == []
    assert json.loads(bed_cli("status", "--json").stdout)["state"] == "stopped"
    bed_cli("up", job, "--set", "run.command.2='3'")  # nothing blocks the next run


def test_every_step_is_an_existing_method() -> None:
    """Most steps are slow tests, which do not run every day."""
    assert [when for when in STEPS if not hasattr(*place(when.split(":")[1]))] == []


@pytest.mark.parametrize("source", ["here", "node1"])
def test_an_image_that_was_pushed_but_not_named_is_listed_and_removed_by_clean(
    bed_cli: Cli, bed: Bed, source: str
) -> None:
    name, (one, two) = "test-unnamed:1", bed.nodes[:2]
    make, remove = f"tar c -C /etc/apt . | docker import - {name}", f"docker image rm {name}"

    def at_source(script: str) -> None:
        if source == "here":
            subprocess.run(script, shell=True, check=True, capture_output=True)
        else:
            bed.sh(one, script)

    at_source(make)
    try:
        before = bed.docker(two, "images", "-aq", "--no-trunc")
        hosts = ["node2"] if source == "here" else ["node1", "node2"]
        job = bed_cli.job("unnamed", nodes=hosts, image={"ref": name}, run={"command": ["true"]})
        killed(bed_cli, "before:name_image:1", "up", job)
        [image] = set(bed.docker(two, "images", "-aq", "--no-trunc").split()) - set(before.split())
        clean = ["clean", "--all-projects", "--nodes", ",".join(hosts)]  # no run of this folder has used the image
        listed = json.loads(bed_cli(*clean, "--json").stdout)
        assert {node["node"]: [found["name"] for found in node["images"]] for node in listed} == (
            {"node1": [], "node2": [image[7:19]]} if source == "node1" else {"node2": [image[7:19]]}
        )
        bed_cli(*clean, "--yes")
        assert image not in bed.docker(two, "images", "-aq", "--no-trunc")
    finally:
        at_source(remove)
