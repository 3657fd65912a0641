"""The caller is a Mac, as far as Python can pretend on Linux: what Linux alone has is missing (tests/bed/laptop.py).

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
def test_a_mac_cannot_be_a_node_and_is_told_so_before_anything_starts(
    mac: Cli, tmp_path: Path, keys: dict[str, object]
) -> None:
    file = mac.job("here", nodes=["local"], gpus="none", run={"command": ["true"]}, **keys)
    refused = mac("up", file, code=3)
    assert "this machine runs macOS, and nodes must run Linux" in refused.stderr
    assert "nodes: [gpu-a, gpu-b]" in refused.stderr
    assert not mac.runs()
    assert laptop.called(tmp_path) == []


def test_what_needs_no_node_works_on_a_mac(mac: Cli, tmp_path: Path) -> None:
    mac("init", "job.yaml")
    mac("plan", "job.yaml", "--offline")
    mac("schema")
    mac("runs")
    assert laptop.called(tmp_path) == []
