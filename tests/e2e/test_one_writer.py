"""Each file has one writer: the output of a run in runs/ and on the screen, with any number of followers.

Here with plain processes on this machine. With lost connections and unreachable nodes: test_logs_on_bed, test_silence.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.e2e.cli import Cli, small_disk
from tests.e2e.drill import Drill
from tests.e2e.test_process_runtime import process_job

pytestmark = pytest.mark.timeout(400)

TOKEN = "hunter2-of-the-test"
FLOOD = 40_000  # lines
# Each secret is written in two halves, so that it arrives in two pieces.
LINE = "echo line $i; printf hunter2-; sleep 0.5; echo of-the-test; sleep 0.2"
HALVES = f"for i in 1 2 3 4; do {LINE}; done; until [ -e both ]; do sleep 0.1; done; for i in 5 6 7 8; do {LINE}; done"


def job(cli: Cli, name: str, script: str, **keys: object) -> Path:
    return cli.job(name, **process_job(nodes=["local"], run={"command": ["sh", "-c", script]}, **keys))


def there(cli: Cli) -> bytes:
    """Return the log on the node."""
    return Path(cli.env["HOME"], ".launcher", cli.runs()[-1].name, "logs", "local.log").read_bytes()


def here(cli: Cli) -> bytes:
    log = cli.runs()[-1] / "logs" / "local.log"
    return log.read_bytes() if log.exists() else b""


def shown(drill: Drill) -> list[str]:
    return [line for _, line in drill.lines]


@pytest.mark.ci
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
@pytest.mark.parametrize("code", [0, 3])
def test_a_full_local_disk_loses_no_output(home_cli: Cli, code: int) -> None:
    """Each node prints more than the disk holds, most of it just before it exits."""
    flood = f'echo begun; sleep 1; [ "$RANK" != 0 ] || seq {FLOOD}; head -c 400000 /dev/zero | tr "\\0" x; exit {code}'
    keys = process_job(run={"command": ["sh", "-c", flood]})
    with small_disk(home_cli.cwd / "runs"):
        done = home_cli("up", home_cli.job("full", **keys), code=1 if code else 0)
        lines = done.stdout.splitlines()
        assert lines[: FLOOD + 1] == ["begun", *map(str, range(1, FLOOD + 1))]
        assert lines[FLOOD + 1] == "x" * 400_000
        missing = [line for line in done.stderr.splitlines() if "not downloaded" in line and "/logs/" in line]
        assert len(missing) == done.stderr.count("then run: launcher fetch") == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "curves in runs/" not in done.stderr
        assert "lacks some logs or curves" in done.stderr
        home_cli("down", code=None)


def test_runs_has_every_line_once_however_often_the_launcher_is_killed(home_cli: Cli) -> None:
    script = f"for i in $(seq 1 10); do seq $((i * 1000)) $((i * 1000 + 999)); sleep 0.5; done; seq {FLOOD}"
    up = Drill.follow(home_cli, "up", job(home_cli, "killed", script))
    up.sees("^1000$")
    up.stop()
    for moment in (0.9, 1.1, 1.3):
        again = Drill.follow(home_cli, "logs")
        time.sleep(moment)
        again.stop()
        assert there(home_cli).startswith(here(home_cli))
    last = home_cli("logs").stdout
    assert last.splitlines() == [str(i) for i in [*range(1000, 11_000), *range(1, FLOOD + 1)]]
    assert here(home_cli) == there(home_cli) == last.encode()


def test_two_launchers_that_follow_a_run_store_each_line_once(home_cli: Cli) -> None:
    prints = f"for i in $(seq 1 6); do seq {FLOOD // 4}; sleep 0.5; done; echo attempt"
    script = f"{prints}; [ -e again ] || {{ >again; exit 1; }}"
    up = Drill.follow(home_cli, "up", job(home_cli, "both", script, restarts=1))
    up.sees("^1$")
    other = home_cli("logs")
    up.end(0)
    assert shown(up) == other.stdout.splitlines()
    assert here(home_cli) == there(home_cli) == other.stdout.encode()
    assert there(home_cli).count(b"attempt\n") == 2


@pytest.mark.ci
@pytest.mark.parametrize("knows", ["the first", "the second"])
def test_a_secret_that_one_launcher_masks_is_never_written_in_clear(home_cli: Cli, knows: str) -> None:
    """Only one of two followers knows the secret: its output is masked, even if the other one stores it."""
    with_secret = Cli(home_cli.cwd, {**home_cli.env, "TOKEN": TOKEN})
    script = job(with_secret, "secret", f"cd {home_cli.cwd}; {HALVES}", secrets=["TOKEN"])
    if knows == "the first":
        first = knowing = Drill.follow(with_secret, "up", script)
        first.sees("^line 1$")
        second = Drill.follow(home_cli, "logs")
        second.sees("not masked, as their values are unknown on this machine: TOKEN")
    else:
        with_secret("up", "-d", script)
        first = Drill.follow(home_cli, "logs")
        first.sees("^line 1$")
        second = knowing = Drill.follow(with_secret, "logs")
    second.sees("^line 1$")
    (home_cli.cwd / "both").touch()
    first.end(0)
    second.end(0)
    assert shown(knowing) == [line for i in range(1, 9) for line in (f"line {i}", "***")]
    assert there(home_cli).count(TOKEN.encode()) == 8
    assert here(home_cli) == there(home_cli).replace(TOKEN.encode(), b"*" * len(TOKEN))


@pytest.mark.ci
def test_runs_is_complete_after_only_the_end_was_shown(home_cli: Cli) -> None:
    script = f"seq {FLOOD}; echo quiet; until [ -e {home_cli.cwd}/shown ]; do sleep 0.2; done; seq 5"
    home_cli("up", "-d", job(home_cli, "tail", script))
    home_cli.until_logged("quiet")
    for path in (home_cli.runs()[-1] / "logs").iterdir():
        path.unlink()
    tail = Drill.follow(home_cli, "logs", "--tail", 2)
    tail.sees("^quiet$")
    (home_cli.cwd / "shown").touch()
    tail.end(0)
    assert shown(tail) == [str(FLOOD), "quiet", *"12345"]
    assert here(home_cli) == there(home_cli)
    assert home_cli("logs").stdout.encode() == there(home_cli)
