"""A run with a node that stops responding after it was connected: it is shown, and the other nodes are stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import launcher
from launcher.errors import NodeUnreachable, NotConfirmed
from launcher.model.container import ContainerState
from launcher.node.connect import Fleet
from launcher.node.process.engine import ProcessEngine
from launcher.records.paths import RunPaths
from launcher.records.store import Record
from launcher.run.locate import connected_run
from tests.ports import free_port


class Mortal(ProcessEngine):
    """An engine whose node no longer responds once `dead` is set."""

    dead = False

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        if self.dead:
            raise NodeUnreachable(f"node {self.node}", "no answer within 60 s", "check that it is up")
        return super().list(labels)


@pytest.fixture
def connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[launcher.Run, Mortal]:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    said: list[str] = []
    keys = {"name": "dies", "runtime": "process", "nodes": ["local", "local"], "port": free_port()}
    made = launcher.up({**keys, "run": {"command": ["sh", "-c", "echo here; exec sleep 600"]}}, log=said.append)
    record = Record(RunPaths(made.folder))
    engines = [Mortal(name) for name in made.nodes]
    return launcher.Run(record, None, said.append, connected_run(record, Fleet(engines, {}, None))), engines[1]


def test_it_is_shown_and_the_other_nodes_are_stopped(connected: tuple[launcher.Run, Mortal]) -> None:
    run, engine = connected
    engine.dead = True
    try:
        seen = run.status()
        assert [(node.node, node.state) for node in seen.nodes] == [("local-0", "running"), ("local-1", "unreachable")]
        assert seen.state == "running"
        assert run.exec(["true"]) == 0
        fetched = run.fetch()
        assert [error.where for error in fetched.failed] == ["node local-1"]
        assert list(run.logs(all_nodes=True, follow=False)) == ["here"]
        with pytest.raises(NotConfirmed) as caught:
            run.down()
    finally:
        engine.dead = False
        left = run.down()
    assert caught.value.exit_code == 6
    assert [removed.node for removed in caught.value.removed] == ["local-0"]
    assert [container.stopped for removed in caught.value.removed for container in removed.containers] == [True]
    assert "node local-1: no answer within 60 s" in str(caught.value)
    assert [container.stopped for removed in left for container in removed.containers] == [True]
