"""A machine; its processes are killed after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.node.process import supervisor
from tests.process.machine import Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = Machine(tmp_path)
    yield made
    left = made.alive()
    for name in made.names:
        supervisor.end(name)
    assert not left or any(made.output.glob(".node/*/state.json")), f"processes left over: {left}"
