"""A sweep from Python, in the process that a notebook is."""

from __future__ import annotations

from pathlib import Path

import pytest

import launcher
from launcher.features.sweeps.sweep import Sweep
from tests.ports import free_port


def test_a_change_of_the_working_directory_does_not_split_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second variant starts in another folder: its record, code and secret are where the first one has them."""
    project = tmp_path / "project"
    (tmp_path / "home").mkdir()
    project.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(project)
    (project / "said").write_text("hello")
    (project / "token").write_text("hunter2-and-more")
    (project / "token").chmod(0o600)
    run = {"command": ["sh", "-c", 'echo "$(cat said) $TOKEN"', "sh"]}
    keys = {"name": "moved", "runtime": "process", "nodes": {"pool": ["local"]}, "run": run, "port": free_port()}
    sweep = Sweep(
        launcher.load({**keys, "secrets": [{"TOKEN": "token"}], "sweep": [{"x": 1}, {"x": 2}]}), log=lambda _: None
    )
    assert sweep.run(lambda _: monkeypatch.chdir(tmp_path)) == 0
    made = [launcher.find(variant.run, runs=project / "runs", log=lambda _: None) for variant in sweep.variants()]
    assert len({each.id for each in made}) == 2
    for each in made:
        with each:
            assert [*each.logs()] == ["hello ***"]
        assert "hunter2" not in (each.folder / "logs" / "local.log").read_text()
    assert not (tmp_path / "runs").exists()
