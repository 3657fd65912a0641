"""A `down` while `up` starts the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
from tests.e2e.cli import ROOT
from tests.ports import free_port


class StartedMeanwhile(ProcessEngine):
    """Its container is started by another process once `down` has seen that it is not."""

    down = False

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        found = super().list(labels)
        for state in found:
            if self.down and state.phase is Phase.CREATED and state.labels["launcher.purpose"] == "run":
                self.start(state.id)
        return found


def test_a_container_that_is_started_after_down_has_listed_it_is_stopped_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    keys = {"name": "meets", "runtime": "process", "nodes": ["local"], "port": free_port(), "gpus": "none"}
    Path("job.yaml").write_text(yaml.safe_dump({**keys, "run": {"command": ["sleep", "600"]}}))
    killed = [sys.executable, "-m", "tests.e2e.killed", "before:start_process:1", "up", "job.yaml"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(killed, env=env, capture_output=True, check=False).returncode == -signal.SIGKILL
    (folder,) = Path("runs").iterdir()
    engine, record = StartedMeanwhile("local"), Record(RunPaths(folder))
    run = launcher.Run(record, None, lambda _: None, connected_run(record, Fleet([engine], {}, None)))
    engine.down = True
    (removed,) = run.down()
    (container,) = [each.state.name for each in removed.containers if "port" not in each.state.name]
    assert not supervisor.processes(container)
    assert not list((tmp_path / ".launcher").glob("*/.node"))
