"""`local` is this machine's plain processes and its container engine: one that does not answer is said, once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.cli import Cli

NOT_SEARCHED = "warning: containers were not searched: local: its container engine does not answer ("
FIX = "-> on the node: `docker context ls` and DOCKER_HOST name the engine that is asked"


@pytest.fixture
def deaf_cli(home_cli: Cli, tmp_path: Path) -> Cli:
    """With a run of plain processes, and a container engine that does not answer."""
    cli = Cli(home_cli.cwd, {**home_cli.env, "DOCKER_HOST": f"unix://{tmp_path}/docker.sock"})
    cli("up", cli.job("plain", runtime="process", nodes=["local"], run={"command": ["echo", "hello"]}))
    return cli


def test_commands_with_nodes_name_an_engine_of_this_machine_that_does_not_answer(deaf_cli: Cli) -> None:
    run = deaf_cli.runs()[-1].name
    for command in (("runs",), ("logs", "plain", "--no-follow"), ("status",), ("fetch", "plain")):
        done = deaf_cli(*command, "--nodes", "local")
        assert run in done.stdout + done.stderr
        assert (done.stderr.count(NOT_SEARCHED), done.stderr.count(FIX)) == (1, 1), done.stderr
    unknown = deaf_cli("logs", "other", "--nodes", "local", code=2).stderr
    assert unknown.index(NOT_SEARCHED) < unknown.index("other")
    named = deaf_cli("logs", run, "--nodes", "local", "--no-follow")  # no container can be meant
    assert (named.stdout, named.stderr) == ("hello\n", "")
    assert NOT_SEARCHED not in deaf_cli("runs").stderr

    stopped = deaf_cli("down", "--all", "--nodes", "local", code=6).stderr
    assert f"down {run}" in stopped
    assert stopped.count("local: its container engine does not answer (") == 1
    again = deaf_cli("down", "--all", "--nodes", "local", code=6).stderr
    assert again.count("local: its container engine does not answer (") == 1
    assert "nothing to remove" not in again


def test_a_sweep_that_is_found_by_its_nodes_names_it_once(deaf_cli: Cli, tmp_path: Path) -> None:
    run = {"command": ["echo", "hello"]}
    job = deaf_cli.job("grid", runtime="process", nodes=["local"], run=run, sweep=[{"a": 1}, {"a": 2}])
    deaf_cli("up", job)
    group = (deaf_cli.cwd / "runs" / ".sweeps").glob("*.json").__next__().stem
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    seen = Cli(elsewhere, deaf_cli.env)("status", group, "--nodes", "local")
    assert seen.stderr.count(NOT_SEARCHED) == 1, seen.stderr
    assert "a=2" in seen.stdout
