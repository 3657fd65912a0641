"""A `down` while `up` starts the run."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

import launcher
from launcher.model.container import ContainerState, Phase
from launcher.node.connect import Fleet
from launcher.node.process import supervisor
from launcher.node.process.engine import ProcessEngine
from launcher.records.paths import RunPaths
from launcher.records.store import Record
from launcher.run.locate import connected_run
from tests.e2e.cli import ROOT, Cli
from tests.ports import free_port

# `up JOB`, suspended before it starts the second node, once the program of the first one has made FILE.
SUSPENDED = """
import os, signal, sys, time
from launcher.cli.main import main
from launcher.node.process.engine import ProcessEngine
start, begun = ProcessEngine.start, sys.argv.pop()
def wait(self, container):
    if self.node == "local-1":
        while not os.path.exists(begun):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGSTOP)
    start(self, container)
ProcessEngine.start = wait
sys.argv[:] = ["launcher", *sys.argv[1:]]
main()
"""


class StartedMeanwhile(ProcessEngine):
    """Its container is started by another process once `down` has seen that it is not."""

    down = False

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        found = super().list(labels)
        for state in found:
            if self.down and state.phase is Phase.CREATED and state.labels["launcher.purpose"] == "run":
                self.start(state.id)
                while not Path("begun").exists():
                    time.sleep(0.02)
        return found


class RemovedMeanwhile(ProcessEngine):
    """Its container is removed by somebody else once `down` has listed it."""

    def stop(self, container: str, grace: float) -> ContainerState:
        super().stop(container, grace)
        self.remove(container)
        return super().stop(container, grace)


def test_a_container_that_is_removed_after_down_has_listed_it_needs_no_confirmation(
    home_cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"command": ["sh", "-c", "exec sleep 600"]}
    home_cli("up", "-d", home_cli.job("gone", runtime="process", gpus="none", nodes=["local"], run=run))
    monkeypatch.setenv("HOME", home_cli.env["HOME"])
    monkeypatch.chdir(home_cli.cwd)
    (folder,) = home_cli.runs()
    engine, record = RemovedMeanwhile("local"), Record(RunPaths(folder))
    (removed,) = launcher.Run(record, None, lambda _: None, connected_run(record, Fleet([engine], {}, None))).down()
    assert [each.state.name for each in removed.containers if "port" not in each.state.name] == []
    assert not list(Path(home_cli.env["HOME"], ".launcher").glob("*/.node"))


def test_a_container_that_is_started_after_down_has_listed_it_is_stopped_collected_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    keys = {"name": "meets", "runtime": "process", "nodes": ["local"], "port": free_port(), "gpus": "none"}
    begun = shlex.quote(str(Path("begun").absolute()))
    program = f"trap 'echo saved; exit 0' TERM; touch {begun}; while :; do sleep 0.1; done"
    Path("job.yaml").write_text(yaml.safe_dump({**keys, "run": {"command": ["sh", "-c", program]}}))
    killed = [sys.executable, "-m", "tests.e2e.killed", "before:start_process:1", "up", "job.yaml"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(killed, env=env, capture_output=True, check=False).returncode == -signal.SIGKILL
    (folder,) = Path("runs").iterdir()
    engine, record = StartedMeanwhile("local"), Record(RunPaths(folder))
    run = launcher.Run(record, None, lambda _: None, connected_run(record, Fleet([engine], {}, None)))
    engine.down = True
    (removed,) = run.down()
    (one,) = [each for each in removed.containers if "port" not in each.state.name]
    assert one.stopped
    assert not supervisor.processes(one.state.name)
    (log,) = folder.rglob("local.log")
    assert log.read_text().splitlines()[-1] == "saved"
    assert not list((tmp_path / ".launcher").glob("*/.node"))


def test_an_up_that_goes_on_after_down_has_stopped_its_run_keeps_what_the_program_wrote(home_cli: Cli) -> None:
    """It was suspended while it started the run."""
    begun = home_cli.cwd / "begun"
    program = f"echo result > result; touch {begun}; exec sleep 600"
    run = {"command": ["sh", "-c", program]}
    job = home_cli.job("late", runtime="process", gpus="none", nodes=["local", "local"], run=run)
    argv, env = (
        [sys.executable, "-c", SUSPENDED, "up", str(job), str(begun)],
        {**os.environ, "PYTHONPATH": str(ROOT), **home_cli.env},
    )
    up = subprocess.Popen(argv, cwd=home_cli.cwd, env=env, stderr=subprocess.PIPE, text=True)
    os.waitid(os.P_PID, up.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    home_cli("down", "late")
    up.send_signal(signal.SIGCONT)
    _, said = up.communicate(timeout=120)
    assert up.returncode == 3, said
    assert "the program had begun, so " in said
    assert "-> to download it: launcher fetch late-" in said
    (result,) = (home_cli.cwd.parent / "home" / ".launcher").glob("late-*/workdir/local-0/result")
    home_cli("fetch", result.parts[-4], "--checkpoints")
    assert (home_cli.runs()[0] / "workdir" / "local-0" / "result").read_text() == "result\n"
