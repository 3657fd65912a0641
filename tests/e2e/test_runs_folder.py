"""Unexpected files in runs/ or instead of it: only regular files are read, and dangling links are reported."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.cli import Cli, small_disk

JOB = {
    "runtime": "process",
    "nodes": ["local"],
    "run": {"command": ["sh", "-c", "echo; echo '{}' >$LAUNCHER_OUTPUT/metrics.jsonl"]},
}
# Each command must exit without a traceback, although reading a FIFO blocks and /dev/zero is endless.
COMMANDS = [["runs"], ["status"], ["logs"], ["logs", "-F"], ["fetch"], ["compare", "odd"], ["down"], ["down", "--all"]]


def linked_fifo(path: Path) -> None:
    pipe = path.parent / "a pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    path.symlink_to(pipe.absolute())


KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "link to a fifo": linked_fifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.ci
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_read(home_cli: Cli, kind: str) -> None:
    home_cli("up", home_cli.job("odd", **JOB))
    run = home_cli.runs()[-1]
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in ("plan.json", "code.tar.gz")]
    names = {path.name for path in files}
    assert {"job.yaml", "events.jsonl", "result.json", "metrics.jsonl", "local.log", "local.attempts"} <= names
    for path in files:
        path.unlink()
        KINDS[kind](path)
    for command in COMMANDS:
        assert "unexpected" not in home_cli(*command, code=None, timeout=20).stderr, command
    (run / "plan.json").unlink()
    KINDS[kind](run / "plan.json")
    assert "no runs yet" in home_cli("runs", timeout=20).stdout


@pytest.mark.ci
@pytest.mark.parametrize("there", [None, "file", "a link to itself"])
def test_a_runs_path_that_is_no_folder_is_reported_with_a_fix(home_cli: Cli, there: str | None) -> None:
    """A link to a disk that is not mounted must not look like a folder without runs."""
    runs = home_cli.cwd / "runs"
    if there == "file":
        runs.touch()
    else:
        runs.symlink_to("runs" if there else "/mnt/data/runs")
    problem = {None: "is a link to /mnt/data/runs, which does not exist", "file": "is not a folder"}.get(
        there, "is a link"
    )
    for command in (
        ["runs"],
        ["runs", "--json"],
        ["status"],
        ["down"],
        ["down", "--all"],
        ["up", home_cli.job("a", **JOB)],
    ):
        refused = home_cli(*command, code=2).stderr
        assert f"error runs: {problem}" in " ".join(refused.split()), command
    assert not list(Path(home_cli.env["HOME"], ".launcher").glob("a-*"))
    runs.unlink()


@pytest.mark.parametrize("size", ["4k", "12k"])  # without and with a plan, by which a folder is a run
def test_a_start_without_room_for_its_record_names_the_file_and_leaves_nothing(
    home_cli: Cli, tmp_path: Path, size: str
) -> None:
    job = home_cli.job("roomless", **JOB, code=str(home_cli.cwd))
    with small_disk(tmp_path / "small", size):
        cli = replace(home_cli, cwd=tmp_path / "small")
        refused = cli("up", job, code=3).stderr
        where = re.escape(f"error this machine: the disk of {cli.cwd}/runs/roomless-")
        assert re.search(where + r"[0-9a-f-]+/\w+[.\w]+ is full\n  -> free some space there", refused), refused
        assert list(cli.cwd.iterdir()) == []


def test_a_dangling_link_in_runs_hides_no_other_run(home_cli: Cli) -> None:
    home_cli("up", home_cli.job("there", **JOB))
    run = home_cli.runs()[-1]
    away = home_cli.cwd / "runs" / run.name.replace("there", "away")
    away.symlink_to("/mnt/data/away")
    assert run.name in home_cli("runs").stdout
    seen = home_cli("runs").stderr
    assert f"runs/{away.name} is a link to /mnt/data/away, which does not exist" in seen
    shutil.rmtree(run)


@pytest.mark.parametrize("closed", [">&-", ">/dev/full", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_run_is_supervised_without_a_place_for_its_output(home_cli: Cli, closed: str) -> None:
    run = {"command": ["sh", "-c", "echo hello; sleep 0.5; echo bye; exit 7"]}
    job = home_cli.job(runtime="process", nodes=["local"], run=run)
    called = shlex.join([*home_cli.launcher, "up", str(job)])
    shell = replace(home_cli, launcher=("sh", "-c"))
    shell(f"{called} {closed}", code=1)
    assert home_cli.result()["failure"]["exit_code"] == 7
    assert (home_cli.runs()[-1] / "logs" / "local.log").read_text() == "hello\nbye\n"
