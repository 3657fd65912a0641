"""A start of a variant that is tried again: what another run takes meanwhile is found when it is claimed."""

from __future__ import annotations

from pathlib import Path

import pytest

import launcher
from launcher.api.inputs import inputs_of
from launcher.api.up import StartOptions
from launcher.errors import InUse, NodesFailed
from launcher.features.sweeps.attempt import attempt
from launcher.model.plan import Membership, new_run_id
from launcher.model.progress import silent
from launcher.records.store import records
from launcher.run.cluster import own_machines
from tests.ports import free_port


def test_an_attempt_that_is_refused_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("home", "project"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "project")
    keys = {
        "runtime": "process",
        "nodes": ["local", "local"],
        "port": free_port(),
        "run": {"command": ["sleep", "600"]},
    }
    job, first = (launcher.load({"name": name, **keys}) for name in ("late", "first"))
    others: list[launcher.Run] = []

    def lose(_: str) -> None:
        """The first line is said when it is known that the port is free."""
        if not others:
            others.append(launcher.up(first, log=None))

    with pytest.raises(NodesFailed) as refused:
        attempt(
            job,
            inputs_of(job, own_machines(job), silent),
            Membership(new_run_id("late"), "x=1"),
            StartOptions(log=lose),
        )
    assert [type(error) for error in refused.value.errors] == [InUse]
    with others[0] as other:
        assert [record.run for record in records()] == [other.id]
        assert [path.name for path in Path("runs").glob("late-*")] == []
        other.down(purge=True)
