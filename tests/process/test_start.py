"""What remains of a start that failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def test_a_node_that_does_not_answer_keeps_no_folder_of_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
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
