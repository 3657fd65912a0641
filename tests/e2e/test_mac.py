"""The caller is a Mac, simulated on Linux: features that only Linux has are missing (tests/bed/laptop.py).

With nodes: tests/bed/test_image_laptop.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bed import laptop
from tests.e2e.cli import Cli


@pytest.fixture
def mac(home_cli: Cli, tmp_path: Path) -> Cli:
    return Cli(home_cli.cwd, {**home_cli.env, **laptop.mac(tmp_path)})


@pytest.mark.parametrize("keys", [{"runtime": "process"}, {"image": {"ref": "any"}}], ids=["process", "docker"])
def test_a_mac_as_a_node_is_refused_before_anything_starts(mac: Cli, tmp_path: Path, keys: dict[str, object]) -> None:
    file = mac.job("here", nodes=["local"], gpus="none", run={"command": ["true"]}, **keys)
    refused = mac("up", file, code=3)
    assert "nodes must run Linux, but this machine runs macOS" in refused.stderr
    assert "nodes: [gpu-a, gpu-b]" in refused.stderr
    assert not mac.runs()
    assert laptop.called(tmp_path) == []


def test_commands_that_need_no_node_work_on_a_mac(mac: Cli, tmp_path: Path) -> None:
    mac("init", "job.yaml")
    mac("plan", "job.yaml", "--offline")
    mac("schema")
    mac("runs")
    assert laptop.called(tmp_path) == []
