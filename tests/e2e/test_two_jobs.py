"""A second job on the same machines: it gets a port of its own, and what refuses it comes early."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import launcher
from launcher.api.inputs import inputs_of
from launcher.api.up import StartOptions, start_run
from launcher.errors import NodesFailed
from launcher.job.models import PORTS
from launcher.run.cluster import own_machines
from launcher.run.locate import caller
from launcher.run.state import RunState
from tests.e2e.cli import Cli
from tests.nvidia import Card, Machine

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


class Loser:
    """Starts a run in a folder of its own, and before its containers are created another one: as while its image is
    copied, when its GPUs and its port have been chosen.
    """

    def __init__(self, job: dict[str, object], other: dict[str, object]) -> None:
        self.job, self.other = (
            launcher.load({"name": name, "runtime": "process", **keys})
            for name, keys in (("late", job), ("first", {**other, "run": {"command": ["sleep", "600"]}}))
        )
        self.lines: list[str] = []
        self.others: list[launcher.Run] = []

    def start(self, *, wait: bool = False) -> launcher.Run:
        destination = own_machines(self.job)
        inputs = inputs_of(self.job, destination, self.lines.append)
        return start_run(self.job, destination, inputs, None, StartOptions(log=self._log, wait=wait))

    def _log(self, line: str) -> None:
        """The first line is said when they have been chosen."""
        self.lines.append(line)
        if not self.others:
            self.others.append(launcher.up(self.other, log=self.lines.append))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a project of its own; bin/ is on the PATH."""
    for name in ("home", "project", "bin"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SMI_CALLS", str(tmp_path / "calls"))
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_run_that_loses_its_port_before_it_starts_uses_another() -> None:
    here: dict[str, object] = {"nodes": ["local", "local"]}
    loser = Loser({**here, "run": {"command": ["sh", "-c", "echo port $MASTER_PORT"]}}, here)
    with loser.start() as late:
        assert late.wait().state is RunState.DONE
        assert late.plan is not None
        port = late.plan.rendezvous.port
        assert list(late.logs()) == [f"port {port}"]
        assert planned_port(Path(late.folder)) == port
    (first,) = loser.others
    assert first.plan is not None
    assert first.plan.rendezvous.port < port
    taken = f"rendezvous port {first.plan.rendezvous.port} is locked by run {first.id}"
    assert any(taken in line and line.endswith(": the run is planned again") for line in loser.lines), loser.lines
    with first:
        first.down(purge=True)


@pytest.mark.parametrize("wait", [False, True])
def test_a_run_that_loses_its_gpu_before_it_starts_uses_another(folder: Path, wait: bool) -> None:
    Machine([Card("07:00.0", "GPU-a"), Card("0f:00.0", "GPU-b")]).install(folder / "bin")
    one: dict[str, object] = {"nodes": ["local"], "gpus": 1}
    loser = Loser({**one, "run": {"command": ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]}}, one)
    with loser.start(wait=wait) as late:
        assert late.wait().state is RunState.DONE
        assert list(late.logs()) == ["GPU-b"]
        assert json.loads((Path(late.folder) / "plan.json").read_text())["nodes"][0]["container"]["gpus"] == ["GPU-b"]
    (first,) = loser.others
    assert [line for line in loser.lines if "planned again" in line] == [
        f"node local: GPU GPU-a is in use by run {first.id} of {caller()}: the run is planned again"
    ]
    with first:
        first.down(purge=True)


@pytest.mark.parametrize("gpus", [1, [0], "all"])
def test_a_run_that_loses_the_only_gpu_before_it_starts_is_refused(folder: Path, gpus: object) -> None:
    """Once, and there is nothing else that it may use."""
    Machine([Card("07:00.0", "GPU-a")]).install(folder / "bin")
    loser = Loser({"nodes": ["local"], "gpus": gpus, "run": {"command": ["true"]}}, {"nodes": ["local"], "gpus": 1})
    with pytest.raises(NodesFailed) as refused:
        loser.start()
    (first,) = loser.others
    with first:
        assert first.id in str(refused.value)
        assert not any("planned again" in line for line in loser.lines), loser.lines
        first.down(purge=True)
