"""A second job on the same machines: it gets a port of its own, and what refuses it comes early."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import launcher
from launcher.api.inputs import inputs_of
from launcher.api.up import StartOptions, start_run
from launcher.job.models import PORTS
from launcher.run.cluster import own_machines
from launcher.run.state import RunState
from tests.e2e.cli import Cli

WAITS = 'echo port $MASTER_PORT; while [ ! -e "$HOME/go" ]; do sleep 0.05; done'


def planned_port(run: Path) -> int:
    return int(json.loads((run / "plan.json").read_text())["rendezvous"]["port"])


def test_a_second_job_gets_a_port_of_its_own(home_cli: Cli) -> None:
    """The first has locked its port, and nothing listens there."""
    keys = {"runtime": "process", "nodes": ["local", "local"], "run": {"command": ["sh", "-c", WAITS]}, "port": None}
    job = home_cli.job("job", **keys)
    for _ in range(3):
        home_cli("up", "-d", job)
    runs = home_cli.runs()
    chosen = [planned_port(run) for run in runs]
    assert len(set(chosen)) == 3
    assert set(chosen) <= set(PORTS)
    for run, port in zip(runs, chosen, strict=True):
        assert "\nport:" not in (run / "job.yaml").read_text()
        assert f"port {port}" in home_cli("logs", "--no-follow", run.name).stdout
    doctor = home_cli("doctor", job, "--set", f"port={chosen[0]}", code=3).stdout
    assert f"{chosen[0]} is in use by run {runs[0].name}" in " ".join(doctor.split())
    given = home_cli("up", job, "--set", f"port={chosen[1]}", code=3).stderr
    assert f"rendezvous port {chosen[1]} is in use by run {runs[1].name}" in given
    (Path(home_cli.env["HOME"]) / "go").touch()
    for run in runs:
        home_cli("logs", run.name)


def test_of_runs_that_start_together_each_gets_a_port(home_cli: Cli) -> None:
    keys = {"runtime": "process", "nodes": ["local", "local"], "run": {"command": ["sh", "-c", WAITS]}, "port": None}
    job = home_cli.job("twins", **keys)
    both = [home_cli.start("up", "-d", job) for _ in range(4)]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in both]
    assert [code for _, _, code in ended] == [0] * 4, ended
    assert len({planned_port(run) for run in home_cli.runs()}) == 4
    (Path(home_cli.env["HOME"]) / "go").touch()


def test_a_run_that_loses_its_port_before_it_starts_uses_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run takes the port after this one has chosen it, as while its image is copied."""
    for folder in ("home", "project"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "project")
    here = {"runtime": "process", "nodes": ["local", "local"]}
    job = launcher.load({"name": "late", "run": {"command": ["sh", "-c", "echo port $MASTER_PORT"]}, **here})
    waits = launcher.load({"name": "first", "run": {"command": ["sleep", "600"]}, **here})
    lines: list[str] = []
    others: list[launcher.Run] = []
    destination = own_machines(job)

    def lose(line: str) -> None:
        """The first line is said when the port has been chosen."""
        lines.append(line)
        if not others:
            others.append(launcher.up(waits, log=lines.append))

    options, inputs = StartOptions(log=lose), inputs_of(job, destination, lines.append)
    with start_run(job, destination, inputs, None, options) as late:
        assert late.wait().state is RunState.DONE
        assert late.plan is not None
        port = late.plan.rendezvous.port
        assert list(late.logs()) == [f"port {port}"]
        assert planned_port(Path(late.folder)) == port
    (first,) = others
    assert first.plan is not None
    assert first.plan.rendezvous.port < port
    taken = f"rendezvous port {first.plan.rendezvous.port} is locked by run {first.id}"
    assert any(line.startswith(taken) and line.endswith("another port is used") for line in lines), lines
    with first:
        first.down(purge=True)
