"""`launcher status` and its live table: nodes, progress, last line of output."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cli import Cli

pytestmark = pytest.mark.timeout(200)

# Reports step 7 of 9 and waits for a file; the second node reports nothing.
PROGRAM = """
import json, os, sys, time
from pathlib import Path
output = Path(os.environ["LAUNCHER_OUTPUT"])
if os.environ["RANK"] == "0":
    line = {"kind": "step", "epoch": 2, "epochs": 6, "step": 7, "steps": 9, "images_per_s": 910.5, "data_wait": 0.25}
    (output / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
print("token is", os.environ["TOKEN"], flush=True)
while not (output / "enough").exists():
    time.sleep(0.1)
"""


@pytest.fixture
def running(cli: Cli, tmp_path: Path) -> Iterator[Cli]:
    """A waiting run on two nodes."""
    (tmp_path / "home").mkdir()
    local = Cli(cli.cwd, {**cli.env, "HOME": str(tmp_path / "home"), "TOKEN": "hush-hush"})
    (local.cwd / "waits.py").write_text(PROGRAM)
    run = {"command": ["python3", "waits.py"]}
    job = local.job("waits", runtime="process", nodes=["local", "local"], run=run, secrets=["TOKEN"])
    local("up", "-d", job)
    local.until_logged("token is")
    yield local
    local("down", "--all", code=None)


def finish(cli: Cli) -> None:
    (Path(cli.env["HOME"]) / ".launcher" / cli.runs()[-1].name / "enough").touch()


@pytest.mark.ci
def test_the_table_has_only_columns_with_known_values(running: Cli) -> None:
    shown = running("status").stdout
    progress, head, first, second = shown.splitlines()[1:5]
    assert progress.strip() == "epoch 2/6  step 7/9  910 images/s  data wait 25%"
    assert head.split() == ["state", "node", "ranks", "restarts", "age", "memory", "last", "line"]
    assert re.search(r"running +local-0 +0 +0 +\d:\d\d +[\d.]+/\d+ GiB +token is \*+", first)
    assert re.search(r"running +local-1 +1 +0 +\d:\d\d +[\d.]+/\d+ GiB +token is \*+", second)
    assert "hush-hush" not in shown + running("status", "--json").stdout
    seen = json.loads(running("status", "--json").stdout)
    assert seen["progress"]["step"] == 7
    assert all(0 < node["use"]["memory"] < node["use"]["memory_total"] for node in seen["nodes"])


def test_a_folder_that_does_not_know_the_secrets_says_that_the_last_lines_are_not_masked(
    running: Cli, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    run, other = running.runs()[-1].name, Cli(tmp_path / "other", running.env)
    said = "warning: not masked, as their values are unknown on this machine: secrets of this run"
    for options in ([], ["--json"]):
        assert "not masked" not in running("status", *options).stderr
        shown = other("status", run, "--nodes", "local", *options)
        assert "token is hush-hush" in shown.stdout
        assert shown.stderr.count(said) == 1


def test_the_live_table_updates_until_the_run_has_ended(running: Cli) -> None:
    process = running.start("status", "--watch")
    finish(running)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "done" in out
    assert "local-1" in out
