"""`clean` removes what this folder's runs left, and nothing that is only there; `logs` then shows the local copy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import Cli
from tests.e2e.terminal import Person

pytestmark = pytest.mark.timeout(200)

JOB: dict[str, Any] = {"runtime": "process", "nodes": ["local"]}
SAVES = "mkdir -p $LAUNCHER_OUTPUT/checkpoints; head -c {size} /dev/zero >$LAUNCHER_OUTPUT/checkpoints/last.pt; echo ok"


@pytest.fixture
def home_cli(home_cli: Cli, tmp_path: Path) -> Cli:
    """Without this machine's Docker engine, whose images are not the test's."""
    return Cli(home_cli.cwd, {**home_cli.env, "DOCKER_HOST": f"unix://{tmp_path}/docker.sock"})


def ended(cli: Cli, name: str, script: str) -> Path:
    """Let a run end and take it down; return its output folder."""
    cli("up", cli.job(name, **JOB, run={"command": ["sh", "-c", script]}))
    cli("down")
    return Path(cli.env["HOME"], ".launcher", cli.runs()[-1].name)


def test_clean_keeps_other_projects_and_what_was_not_fetched(home_cli: Cli, tmp_path: Path) -> None:
    theirs = ended(home_cli, "theirs", SAVES.format(size=3000))
    project = tmp_path / "another project"
    project.mkdir()
    cli = Cli(project, home_cli.env)
    saved = ended(cli, "saved", SAVES.format(size=3000))
    plain = ended(cli, "plain", "seq 3")

    listed = cli("clean", "--yes")
    assert str(theirs) not in listed.stdout
    assert "1 output folder (" in listed.stderr
    assert "of runs that were not started here is kept; to list them: --all-projects" in listed.stderr
    assert "NOT FETCHED: 1 file, 3 kB, such as checkpoints/last.pt\n" in listed.stdout
    assert f"to download them: launcher fetch {saved.name} --checkpoints; to remove them: --unfetched" in listed.stderr
    assert "nothing was removed: all of these are kept" in cli("clean", "--yes").stderr
    assert "0 MiB" not in listed.stdout
    assert [each.exists() for each in (theirs, saved, plain)] == [True, True, False]

    assert cli("logs", plain.name).stdout == "1\n2\n3\n"  # from runs/
    assert cli("logs", plain.name, "--tail", "1").stdout == "3\n"
    copied = f"local no longer has the output: this is the copy in runs/{plain.name}/"
    assert copied in cli("logs", plain.name, "-F").stderr

    cli("fetch", saved.name, "--checkpoints")
    assert "NOT FETCHED" not in cli("clean", "--yes").stdout
    assert [each.exists() for each in (theirs, saved)] == [True, False]
    assert f"{saved} on local was deleted by " in (gone := cli("fetch", saved.name).stdout)
    assert "(launcher clean)" in gone

    both = [ended(cli, name, SAVES.format(size=3000)).name for name in ("one", "two")]
    commands = " && ".join(f"launcher fetch {run} --checkpoints" for run in both)
    assert f"to download them: {commands}; to remove them" in cli("clean").stderr
    foreign = "; launcher fetch RUN --checkpoints in the folder where RUN was started; to remove"
    assert f"{commands}{foreign}" in cli("clean", "--all-projects").stderr
    ended(cli, "plain", "seq 3")
    person = Person(cli, "clean")
    person.sees(r"Remove these, except what is kept\? \[y/N\]: ")
    person.type("n\n")
    person.sees("nothing was removed")
    assert person.end() == 0
    assert "removed 1 of these 3; the others are kept\n" in cli("clean", "--yes").stderr
    assert "\nremoved\n" in cli("clean", "--unfetched", "--yes").stderr

    (row,) = json.loads(cli("clean", "--all-projects", "--json", "--yes").stdout)
    (output,) = row["outputs"]
    assert (output["run"], output["started_here"]) == (theirs.name, False)
    assert output["unfetched"] == [{"path": "checkpoints/last.pt", "bytes": 3000}]
    assert theirs.exists()
    cli("clean", "--all-projects", "--unfetched", "--yes")
    assert not theirs.exists()


def test_runs_that_have_ended_are_kept_until_they_are_taken_down(home_cli: Cli, tmp_path: Path) -> None:
    home_cli("up", home_cli.job("ended", **JOB, run={"command": ["echo", "x"]}))
    home_cli("up", "-d", home_cli.job("goes-on", **JOB, run={"command": ["sleep", "600"]}))
    ended = home_cli.runs()[0].name
    kept = "1 run that has ended was not taken down and is kept: "
    listed = home_cli("clean", "--yes")
    assert listed.stdout == "nothing to remove\n"
    assert f"{kept}launcher down {ended}; then repeat the command\n" in listed.stderr
    (row,) = json.loads(home_cli("clean", "--json").stdout)
    assert row["ended"] == [{"run": ended, "started_here": True}]

    cli = Cli(tmp_path, home_cli.env)  # another folder
    assert "not taken down" not in cli("clean", "--nodes", "local").stderr
    foreign = cli("clean", "--nodes", "local", "--all-projects").stderr
    assert f"{kept}launcher down {ended} --nodes local; then" in foreign

    for name in ("f", "g", "h"):
        home_cli("up", home_cli.job(name, **JOB, run={"command": ["true"]}))
    many = f"kept: launcher down RUN for each of {ended}, f-"
    assert many in (said := home_cli("clean").stderr)
    assert " and 1 more, or launcher down --all, which also stops the runs that go on; then repeat" in said
    home_cli("down", "--all")
    assert "ended-" in (done := home_cli("clean", "--yes")).stdout
    assert "not taken down" not in done.stderr


def test_a_run_of_a_record_that_was_found_by_labels_is_not_this_folders(home_cli: Cli, tmp_path: Path) -> None:
    job = home_cli.job("there", **JOB, run={"command": ["sh", "-c", "echo x; sleep 60"]})
    home_cli("up", "-d", job)
    run = home_cli.runs()[-1].name
    project = tmp_path / "another project"
    project.mkdir()
    cli = Cli(project, home_cli.env)
    cli("fetch", run, "--nodes", "local")
    home_cli("down")
    assert "nothing to remove" in cli("clean").stdout


def test_what_a_program_wrote_to_its_working_directory_is_kept(home_cli: Cli) -> None:
    output = ended(home_cli, "writes", "head -c 4200000 /dev/zero >model.pth")
    listed = home_cli("clean", "--yes").stdout
    assert "NOT FETCHED: 1 file, 4.2 MB, such as workdir/local/model.pth" in listed
    assert output.exists()
    copy = home_cli.runs()[-1] / "workdir" / "local" / "model.pth"
    home_cli("fetch", "--checkpoints")
    os.truncate(copy, 4_000_000)  # not the whole file
    assert "NOT FETCHED" in home_cli("clean", "--yes").stdout


def test_an_engine_of_this_machine_that_does_not_answer_is_named(home_cli: Cli) -> None:
    listed = home_cli("clean", "--nodes", "local")
    assert listed.stdout == "nothing to remove\n"
    unsearched = "warning: containers and images were not searched: local: its container engine does not answer ("
    assert unsearched in listed.stderr
