"""`logs --timestamps`: the times of the lines so far; it does not follow, and of a run that has ended has its code."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

from tests.e2e.cli import Cli

WAITS = 'echo one; while [ ! -e "$HOME/go" ]; do sleep 0.05; done; echo two; exit 3'


def test_a_run_that_goes_on_is_not_followed_and_one_that_has_ended_is_concluded(home_cli: Cli) -> None:
    job = home_cli.job("job", runtime="process", nodes=["local"], run={"command": ["sh", "-c", WAITS]})
    home_cli("up", "-d", job)
    run = home_cli.runs()[-1].name
    home_cli.until_logged("one")
    goes_on = home_cli("logs", "-t", run)
    assert goes_on.stdout.endswith(" one\n")
    assert f"the run goes on, and with --timestamps is not followed: launcher logs {run}" in goes_on.stderr
    (Path(home_cli.env["HOME"]) / "go").touch()
    home_cli("logs", run, code=1)
    lines = [line.split() for line in home_cli("logs", "-t", run, code=1).stdout.splitlines()]
    assert [line for _, line in lines] == ["one", "two"]
    assert all(datetime.fromisoformat(when) for when, _ in lines)
    assert home_cli("logs", "-t", "--no-follow", run).stderr == ""


def test_nobody_has_followed_it(home_cli: Cli) -> None:
    job = home_cli.job("job", runtime="process", nodes=["local"], run={"command": ["sh", "-c", "echo one; exit 4"]})
    home_cli("up", "-d", job)
    deadline = time.monotonic() + 90
    while json.loads(home_cli("runs", "--json").stdout)[0]["state"] != "failed":  # this records nothing
        assert time.monotonic() < deadline
    ended = home_cli("logs", "-t", code=1)
    assert ended.stdout.endswith(" one\n")
    assert not ended.stdout.startswith(("now", "unknown"))
    assert (home_cli.runs()[-1] / "result.json").exists()
