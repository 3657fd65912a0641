"""A job with a sweep: one variant at a time, and none after the user has detached."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cli import Cli

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def sweep(cli: Cli, tmp_path: Path) -> Iterator[tuple[Cli, Path]]:
    """Three variants that print for 0.3, 60 and 0.4 seconds."""
    home = tmp_path / "home"
    home.mkdir()
    local = Cli(cli.cwd, {**cli.env, "HOME": str(home)})
    local.program("ticks.py")
    run = {"command": ["python3", "ticks.py"]}
    job = local.job("sweep", runtime="process", nodes=["local"], run=run, sweep=[["3"], ["600"], ["4"]])
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


def record(cli: Cli, run: str) -> None:
    container = {"name": f"{run}-0", "output_dir": f"/home/me/.launcher/{run}"}
    node = {"node": "n", "host": "n", "rank": 0, "first_rank": 0, "processes": 1, "container": container}
    folder = cli.cwd / "runs" / run
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps({"nodes": [node]}))


def test_a_sweep_is_selected_by_its_id_also_on_nodes_that_have_only_some_of_its_runs(sweep: tuple[Cli, Path]) -> None:
    cli, job = sweep
    cli("up", job, "--set", 'sweep=[["12"], ["3"]]')  # 1.2 s: IDs of one second have no order
    first, second = (run.name for run in cli.runs())
    group = json.loads((cli.runs()[0] / "events.jsonl").read_text().splitlines()[0])["group"]
    for name in ("other", "third"):
        (cli.cwd / name).mkdir()
    other = Cli(cli.cwd / "other", cli.env)  # without their records
    third = Cli(cli.cwd / "third", cli.env)  # with one of them
    third("status", second, "--nodes", "local")
    assert first in (seen := third("status", group, "--nodes", "local")).stdout
    assert second in seen.stdout
    shutil.rmtree(third.cwd / "runs" / first)
    for name, made in ((group, 1), ("sweep", 0)):
        asked = other("status", name, "--nodes", "local", "--json")
        assert [one["run"] for one in json.loads(asked.stdout)] == [first, second]
        assert asked.stderr.count("not recorded here before: a record is made in runs/") == made
    assert other("fetch", group, "--nodes", "local").stderr.count("warning: not masked") == 1
    advised = f"launcher runs {group} --nodes local"
    assert f"for another variant give its run ID: {advised}\n" in other("status", "--nodes", "local").stderr
    listed = other(*advised.split()[1:]).stdout
    assert first in listed
    assert second in listed
    assert second in other("down", "sweep", "--nodes", "local").stderr  # a job's name is its latest run
    assert f"down {first}" in third("down", group, "--nodes", "local").stderr
    cli("up", job, "--set", 'sweep=[["12"], ["3"]]')
    first, second = (run.name for run in cli.runs()[2:])
    group = json.loads((cli.runs()[2] / "events.jsonl").read_text().splitlines()[0])["group"]
    cli("down", first)
    shown = cli("status", group, "--nodes", "local").stdout
    assert second in shown
    assert first not in shown
    assert f"down {second}" in cli("down", group, "--nodes", "local").stderr
    for command in ("status", "down"):
        missing = cli(command, group, "--nodes", "local", code=2).stderr
        assert f"sweep {group}: has no run on local" in " ".join(missing.split())


def test_compare_without_an_argument_has_a_row_for_a_run_without_steps(sweep: tuple[Cli, Path]) -> None:
    cli, _ = sweep
    failed, good = "a-20260101-120000-0000", "a-20260101-130000-0000"
    for run in (failed, good):
        record(cli, run)
    (cli.cwd / "runs" / failed / "result.json").write_text('{"state": "failed"}')
    start = {"kind": "start", "time": 0, "world": 1, "global_batch": 8, "step": 0, "config": {}}
    steps = [{"kind": "step", "time": at, "step": at, "images_per_s": 100.0, "loss": 1.0} for at in (1, 2, 3)]
    (cli.cwd / "runs" / good / "metrics.jsonl").write_text("\n".join(map(json.dumps, [start, *steps])))
    rows = json.loads(cli("compare", "--json").stdout)
    assert [(row["run"], "images_per_s" in row) for row in rows] == [(failed, False), (good, True)]
    assert rows[0]["state"] == "failed"
    assert "failed" in cli("compare").stdout
    assert "failed, no curves" in cli("compare", failed).stdout
