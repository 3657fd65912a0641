"""What remains of a start that failed."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

import launcher
from launcher.errors import NodesFailed, NodeUnfit
from launcher.model.container import ContainerState
from launcher.node import output_folder
from launcher.node.connect import Fleet
from launcher.node.process.engine import ProcessEngine
from launcher.run.begin.start import undo


class Silent(ProcessEngine):
    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.host = "elsewhere"

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        raise NodeUnfit(self.node, "does not answer")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")


def test_a_node_that_does_not_answer_keeps_no_folder_of_another_one(tmp_path: Path) -> None:
    job = {"name": "undone", "runtime": "process", "nodes": ["local", "local"], "run": {"command": ["true"]}}
    plan = launcher.plan(job)
    engines = [ProcessEngine("local-0"), Silent("local-1")]
    spec = plan.node_plan("local-0").container
    output_folder.make(engines[0].files, spec.output_dir, plan.run, spec.workdir)
    refused = NodeUnfit("local-1", "was refused")
    with pytest.raises(NodesFailed) as raised:
        undo(plan, Fleet(engines, {}, None), cause=refused)
    assert [each.what for each in raised.value.errors] == ["was refused", "does not answer"]
    assert not Path(spec.output_dir).exists()


def test_what_a_program_had_printed_before_its_start_was_taken_back_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, start = tmp_path / "begun", ProcessEngine.start

    def start_one(engine: ProcessEngine, container: str) -> None:
        while engine.node == "local-1":
            if begun.exists():
                raise NodeUnfit(engine.node, "does not start")
            time.sleep(0.01)
        start(engine, container)

    monkeypatch.setattr(ProcessEngine, "start", start_one)
    command = ["sh", "-c", f"echo printed; echo x >result; touch {begun}; exec sleep 600"]
    with pytest.raises(NodesFailed, match="does not start"):
        launcher.up({"name": "undone", "runtime": "process", "nodes": ["local", "local"], "run": {"command": command}})
    (log,) = (tmp_path / "project" / "runs").glob("undone-*/logs/local-0.log")
    assert log.read_text() == "printed\n"


def test_copies_of_an_earlier_runs_files_are_not_what_a_program_wrote() -> None:
    plan = launcher.plan({"name": "undone", "runtime": "process", "nodes": ["local"], "run": {"command": ["true"]}})
    engine, spec = ProcessEngine("local"), plan.node_plan("local").container
    code = io.BytesIO()
    tarfile.open(fileobj=code, mode="w:gz").close()
    output_folder.make(engine.files, spec.output_dir, plan.run, spec.workdir)
    for name, when in {"inherited": 1e9, "written": 2e9}.items():
        Path(spec.output_dir, name).write_text("x")
        os.utime(Path(spec.output_dir, name), (when, when))
    undone = partial(undo, plan, Fleet([engine], {}, None), KeyboardInterrupt(), code.getvalue(), inherits=True)
    with pytest.raises(NodesFailed, match="NOT FETCHED: 1 file, 1 B, such as written"):
        undone()
    Path(spec.output_dir, "written").unlink()
    undone()
    assert not Path(spec.output_dir).exists()
