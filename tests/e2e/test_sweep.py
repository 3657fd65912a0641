"""A job with a sweep: one variant after another, never two at once, and none after the user has left."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cli import Cli

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def sweep(cli: Cli, tmp_path: Path) -> Iterator[tuple[Cli, Path]]:
    """Three variants that print for 0.3, 60 and 0.3 seconds."""
    home = tmp_path / "home"
    home.mkdir()
    local = Cli(cli.cwd, {**cli.env, "HOME": str(home)})
    local.program("ticks.py")
    run = {"command": ["python3", "ticks.py"]}
    job = local.job("sweep", runtime="process", nodes=["local"], run=run, sweep=[["3"], ["600"], ["3"]])
    yield local, job
    local("down", "--all", code=None)


def test_a_detached_sweep_is_refused(sweep: tuple[Cli, Path]) -> None:
    cli, job = sweep
    refused = cli("up", "-d", job, code=2)
    assert "run one after another" in refused.stderr
    assert "nohup launcher up" in refused.stderr
    assert cli.runs() == []


@pytest.mark.parametrize(("presses", "code"), [(1, 0), (2, 5)], ids=["left", "stopped"])
def test_detaching_from_or_stopping_a_variant_starts_no_other(sweep: tuple[Cli, Path], presses: int, code: int) -> None:
    cli, job = sweep
    up = cli.start("up", job)
    assert up.stdout
    assert up.stderr
    for line in up.stdout:
        if "tick 10" in line:
            break
    threading.Thread(target=up.stdout.read, daemon=True).start()
    up.send_signal(signal.SIGINT)
    for line in up.stderr:
        if "Ctrl-C again" in line:
            break
    if presses == 2:
        up.send_signal(signal.SIGINT)
    up.stderr.read()
    assert up.wait(60) == code
    assert len(cli.runs()) == 2
    events = [json.loads(line) for line in (cli.runs()[-1] / "events.jsonl").read_text().splitlines()]
    assert [event["variant"] for event in events if event["event"] == "group"] == ["600"]


def test_all_variants_become_one_group(sweep: tuple[Cli, Path]) -> None:
    cli, job = sweep
    cli("up", job, "--set", 'sweep=[["2"], ["3"]]')
    groups = [json.loads((run / "events.jsonl").read_text().splitlines()[0]) for run in cli.runs()]
    assert [group["variant"] for group in groups] == ["2", "3"]
    assert len({group["group"] for group in groups}) == 1
