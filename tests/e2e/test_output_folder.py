"""Programs that lock, remove or change their output folder, and the result."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job

LOCKED = (
    "mkdir -p $LAUNCHER_OUTPUT/checkpoints/deep && touch $LAUNCHER_OUTPUT/checkpoints/deep/file && cd $LAUNCHER_OUTPUT"
)


def ended(cli: Cli, job: Path) -> None:
    """Start a run and let it end, without a launcher that waits for its files."""
    cli("up", "-d", job)
    deadline = time.monotonic() + 60
    while json.loads(cli("status", "--json").stdout)["state"] in ("created", "running"):
        assert time.monotonic() < deadline


@pytest.mark.bed
@pytest.mark.timeout(200)
@pytest.mark.parametrize("what", [".", "checkpoints/deep checkpoints", ".launcher-run ."])
def test_an_output_folder_that_its_program_has_locked_is_purged(bed_cli: Cli, bed: Bed, what: str) -> None:
    program = f"{LOCKED} && chmod 000 {what}"
    ended(bed_cli, bed_cli.job("locks", **bed_job(nodes=["node1"], run={"command": ["sh", "-c", program]})))
    run = bed_cli.runs()[-1].name
    if what == "checkpoints/deep checkpoints":
        listed = bed_cli("clean", code=3)
        assert "nothing to remove" in listed.stdout
        assert "Permission denied" in listed.stderr
        assert f"/.launcher/{run} is kept: could not list " in bed_cli("down", "--purge").stderr
    bed_cli("down", "--purge", "--unfetched")
    bed.sh(bed.nodes[0], f"! test -e /home/trainer/.launcher/{run}")


@pytest.mark.bed
@pytest.mark.timeout(200)
def test_files_of_another_user_in_it_are_named_and_the_rest_is_purged(bed_cli: Cli, bed: Bed) -> None:
    ended(bed_cli, bed_cli.job("owns", **bed_job(nodes=["node1"], run={"command": ["sh", "-c", LOCKED]})))
    run = bed_cli.runs()[-1].name
    folder = f"/home/trainer/.launcher/{run}"
    bed.sh(bed.nodes[0], f"mkdir {folder}/root && touch {folder}/root/file")
    kept = bed_cli("down", "--purge", code=6).stderr
    assert f"{folder}/root/file" in kept
    assert "user trainer must own it and have access to it" in kept
    assert "fix the errors, then repeat the command" in kept
    assert "reachable again" not in kept
    left = bed.sh(bed.nodes[0], f"find {folder} -mindepth 1 -maxdepth 1 -printf '%f '").split()
    assert sorted(left) == [".launcher-run", "root"]
    bed.sh(bed.nodes[0], f"rm -r {folder}/root")
    bed_cli("down", "--purge")
    bed.sh(bed.nodes[0], f"! test -e {folder}")


@pytest.mark.bed
@pytest.mark.timeout(200)
def test_a_folder_without_its_marker_is_kept_and_named(bed_cli: Cli, bed: Bed) -> None:
    ended(
        bed_cli,
        bed_cli.job("odd", **bed_job(nodes=["node1"], run={"command": ["sh", "-c", f"{LOCKED}; rm .launcher-run"]})),
    )
    folder = f"/home/trainer/.launcher/{bed_cli.runs()[-1].name}"
    kept = " ".join(bed_cli("down", "--purge", code=6).stderr.split())
    assert "it has no file .launcher-run of this run" in kept
    assert "reachable again" not in kept
    bed.sh(bed.nodes[0], f"test -e {folder}/checkpoints && rm -r {folder}")


@pytest.mark.ci
@pytest.mark.parametrize("more", ["", "sleep 60"])
def test_a_program_that_removes_its_output_folder_is_reported(home_cli: Cli, more: str) -> None:
    program = f"echo begun; sleep 2; rm -rf $LAUNCHER_OUTPUT; {more}"
    job = home_cli.job("gone", runtime="process", nodes=["local"], run={"command": ["sh", "-c", program]})
    failed = home_cli("up", job, code=1)
    message = " ".join(failed.stderr.split())
    folder = Path(home_cli.env["HOME"], ".launcher", home_cli.runs()[-1].name)
    assert f"failed local lost its output folder {folder}: it was removed or locked while the run used it" in message
    assert "docker" not in message
    assert not folder.exists()
    home_cli("up", home_cli.job("next", runtime="process", nodes=["local"], run={"command": ["true"]}))
