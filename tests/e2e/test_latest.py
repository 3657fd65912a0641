"""Which run is meant when none is named, and what `down` does with the others."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import Cli
from tests.e2e.test_crash import killed

pytestmark = pytest.mark.timeout(200)

# Stands for a home folder that hangs: every script about an output folder blocks, for the stop as well as before it.
HANGING_SH = """#!/bin/bash
case "$*" in *"{home}/.launcher/"*) exec sleep 1000 ;; esac
exec /bin/sh "$@"
"""


def process_job(**keys: Any) -> dict[str, Any]:
    return {"runtime": "process", "nodes": ["local"], "run": {"command": ["sleep", "600"]}, **keys}


def started(cli: Cli, name: str, **keys: Any) -> str:
    cli("up", "-d", cli.job(name, **process_job(**keys)))
    return cli.runs()[-1].name


def states(cli: Cli) -> dict[str, str]:
    return {row["run"]: row["state"] for row in json.loads(cli("runs", "--json").stdout)}


def test_a_refused_up_is_never_the_latest_run(home_cli: Cli) -> None:
    home_cli("up", home_cli.job("before", **process_job(run={"command": ["true"]})))
    before = home_cli.runs()[-1].name  # without a checkpoint to start from
    first = started(home_cli, "first")
    home_cli("up", home_cli.job("first", **process_job()), "--resume", before, code=3)  # the same job again
    again = home_cli.runs()[-1].name
    home_cli("up", home_cli.job("other", **process_job()), "--resume", before, code=3)
    other = home_cli.runs()[-1].name
    assert states(home_cli) == {before: "done", first: "running", again: "refused", other: "refused"}
    assert len({first, again, other}) == 3
    for command in (["status", "first"], ["logs", "-F"], ["fetch"], ["exec", "--", "true"]):
        assert home_cli(*command).stderr.splitlines()[0].endswith(f" is {first}"), command
    assert json.loads(home_cli("status", "--json").stdout)["run"] == first
    alone = home_cli("status", "other", code=2).stderr
    assert f"no run of other has started; {other} did not start" in " ".join(alone.split())
    why = f"was not started: run {before}: has no files to resume from on local"
    shown = home_cli("logs", other, code=3)
    assert (shown.stdout, shown.stderr.startswith(f"error {other}: {why}")) == ("", True), shown
    assert "\n  -> do not purge a run that you want to resume" in home_cli("logs", other, "-F", code=3).stderr
    assert why in " ".join(home_cli("status", other).stdout.split())
    assert json.loads(home_cli("status", other, "--json").stdout)["not_started"] in shown.stderr
    assert f"{other}: {why}" in home_cli("fetch", other).stdout
    assert f"{other} {why}" in home_cli("runs").stderr
    assert json.loads(home_cli("runs", "--json").stdout)[-1]["why"] in shown.stderr
    assert "not started" not in home_cli("logs", before).stderr
    assert f"the latest run is {first}\n" in home_cli("down").stderr
    assert states(home_cli)[first] == "stopped"
    assert "nothing to remove" in home_cli("down", other).stderr  # by its ID it is still found


def test_a_run_whose_launcher_was_killed_before_it_started_says_so(home_cli: Cli) -> None:
    killed(home_cli, "before:create_process:1", "up", home_cli.job("job", **process_job()))
    run = home_cli.runs()[-1].name
    why = "was not started: its launcher is just starting it, or was killed before it had\n"
    why += f"  -> to remove what that may have left: launcher down {run}\n"
    assert f"error {run}: {why}" in home_cli("logs", "job", "--tail", "2", code=1).stderr
    assert why in home_cli("status", "job").stdout
    home_cli("down", run)
    assert states(home_cli) == {run: "stopped"}


def test_down_names_the_run_that_it_chose_and_those_that_may_still_run(home_cli: Cli) -> None:
    one, two = started(home_cli, "one"), started(home_cli, "two")
    said = home_cli("down").stderr
    assert f"the latest run is {two}" in said.splitlines()[0]
    assert f"warning: {one} may still be running; to stop it, run: launcher down {one}" in said
    assert states(home_cli) == {one: "running", two: "stopped"}
    assert "may still" not in home_cli("down", one).stderr


def test_a_run_that_has_ended_unseen_is_not_named(home_cli: Cli) -> None:
    """As a Slurm job that was cancelled with scancel: nobody recorded its end."""
    job = home_cli.job("ends", **process_job(run={"command": ["sh", "-c", "echo over; exit 3"]}))
    home_cli("up", "-d", job)
    ends = home_cli.runs()[-1].name
    deadline = time.monotonic() + 60
    while states(home_cli)[ends] == "running":
        assert time.monotonic() < deadline
    assert states(home_cli)[ends] == "failed"
    two = started(home_cli, "two")
    said = home_cli("down").stderr
    assert f"the latest run is {two}" in said
    assert "may still be running" not in said


def test_a_run_of_another_folder_is_neither_the_latest_nor_taken_down_with_all(home_cli: Cli, tmp_path: Path) -> None:
    theirs = started(home_cli, "theirs")
    project = tmp_path / "another project"
    project.mkdir()
    cli = Cli(project, home_cli.env)
    mine = started(cli, "mine")
    cli("status", theirs, "--nodes", "local")  # leaves a record here
    assert json.loads(cli("status", "--json").stdout)["run"] == mine
    said = cli("down", "--all").stderr
    assert f"skipped: {theirs} was not started in this folder; to stop it, run: launcher down {theirs}" in said
    assert states(cli) == {theirs: "running", mine: "stopped"}
    shutil.rmtree(project / "runs" / mine)
    assert json.loads(cli("status", "--json").stdout)["run"] == theirs  # the only one that this folder knows


def test_down_all_in_another_folder_stops_nothing_and_who_stops_a_run_is_told_to_its_owner(
    home_cli: Cli, tmp_path: Path
) -> None:
    mine, other = started(home_cli, "mine"), started(home_cli, "other")
    empty = tmp_path / "empty"
    empty.mkdir()
    cli = Cli(empty, home_cli.env)
    said = cli("down", "--all", "--nodes", "local").stderr
    assert "nothing to remove" in said
    for run in (mine, other):
        fix = f"launcher down {run} --nodes local; all such runs: --all-projects"
        assert f"skipped: {run} was not started in this folder; to stop it, run: {fix}" in said
    assert states(home_cli) == {mine: "running", other: "running"}
    assert "omit one of them" in cli("down", mine, "--all", "--nodes", "local", code=2).stderr
    obstacle = empty / "runs" / other / "plan.json"
    obstacle.mkdir(parents=True)
    said = cli("down", other, "--nodes", "local", code=3).stderr
    assert (
        "this machine: no record can be made in runs/: Is a directory\n  -> repeat the command in another folder"
        in said
    )
    obstacle.rmdir()

    cli("down", other, "--nodes", "local")
    assert "nothing to remove" in cli("down", "--all", "--nodes", "local").stderr  # its record here is a rebuilt one
    cli("down", "--all-projects", "--nodes", "local")
    assert states(home_cli) == {mine: "stopped", other: "stopped"}
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    assert f"stopped by {by}" in home_cli("runs").stdout
    for run in (mine, other):
        assert f"{run}  stopped by {by}" in home_cli("status", run).stdout
        seen = json.loads(home_cli("status", run, "--json").stdout)
        assert (seen["state"], seen["stopped_by"]) == ("stopped", by)


def test_how_a_run_ended_is_listed_before_anyone_has_recorded_it(home_cli: Cli, tmp_path: Path) -> None:
    done = started(home_cli, "done", run={"command": ["true"]})
    stopped = started(home_cli, "stopped")
    elsewhere = Cli(tmp_path / "elsewhere", home_cli.env)
    elsewhere.cwd.mkdir()
    killed(elsewhere, "before:remove_process:1", "down", stopped, "--nodes", "local")  # its container is still there
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    wanted = {done: ("done", 0, ""), stopped: ("stopped", 5, by)}
    until = time.monotonic() + 60
    while states(home_cli)[done] == "running":
        assert time.monotonic() < until
    for cli, nodes in ((home_cli, ()), (elsewhere, ("--nodes", "local"))):
        rows = json.loads(
            cli("runs", *nodes, "--json").stdout
        )  # by nodes, also what others run in this machine's Docker
        found = {row["run"]: (row["state"], row["exit_code"], row["stopped_by"]) for row in rows}
        assert {run: end for run, end in found.items() if run in wanted or not nodes} == wanted
    assert f"{stopped}  stopped by {by}" in home_cli("status", stopped).stdout


def test_down_all_asks_each_node_once_and_skips_runs_of_which_nothing_is_left(home_cli: Cli) -> None:
    run = started(home_cli, "one")
    plan = home_cli.runs()[0] / "plan.json"
    for number in range(30):  # an ended run each
        copy = home_cli.cwd / "runs" / run.replace("one-", f"past{number}-")
        copy.mkdir(mode=0o700)
        (copy / "plan.json").write_text(plan.read_text().replace(run, copy.name))
    said = home_cli("down", "--all").stderr
    assert "no container is left on the nodes of 30 runs" in said
    assert "(stopped)" in said
    assert set(states(home_cli).values()) == {"stopped"}
    assert "nothing to remove" in home_cli("down", "--all").stderr


def test_an_interrupted_down_says_what_was_not_confirmed(home_cli: Cli) -> None:
    deaf = ["sh", "-c", "trap '' TERM; echo begun; while :; do sleep 0.2; done"]
    run = started(home_cli, "deaf", run={"command": deaf})
    home_cli.until_logged("begun")
    down = home_cli.start("down")
    attempts = Path(home_cli.env["HOME"], ".launcher", run, "state", "local.attempts")
    deadline = time.monotonic() + 30
    while "stopped" not in attempts.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    down.send_signal(signal.SIGINT)
    _, said = down.communicate(timeout=30)
    assert down.returncode == 6, said
    assert "interrupted; not confirmed" in said
    assert f"{run} on local" in said
    assert "nothing was started" not in said
    for container in Path(home_cli.env["HOME"], ".launcher").glob("*/.node/*/state.json"):
        os.kill(json.loads(container.read_text())["pid"], signal.SIGKILL)


def test_a_home_folder_that_hangs_does_not_prevent_the_stop(home_cli: Cli, tmp_path: Path) -> None:
    home = Path(home_cli.env["HOME"])
    settings = home / ".config" / "launcher"
    settings.mkdir(parents=True)
    (settings / "settings.yaml").write_text("limits: {wait: 2s}\n")
    run = started(home_cli, "runs")
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "sh").write_text(HANGING_SH.format(home=home))
    (bin_ / "sh").chmod(stat.S_IRWXU)
    hanging = Cli(home_cli.cwd, {**home_cli.env, "PATH": f"{bin_}:{os.environ['PATH']}"})
    said = hanging("down", run, code=None, timeout=60).stderr
    assert "runs-" in said
    assert "(stopped)" in said
    assert "local: could not tell other launchers who stopped it" in said
    assert not list(home.glob(".launcher/*/.node"))
