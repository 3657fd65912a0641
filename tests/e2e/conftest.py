"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """The launcher in an empty project; its caches are its own."""
    project = tmp_path / "project"
    project.mkdir()
    return Cli(project, {"XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "200"})


@pytest.fixture
def bed_cli(cli: Cli, clean_bed: Bed) -> Cli:
    """The launcher with the bed's ssh config; the bed is clean before and after."""
    return Cli(cli.cwd, {**cli.env, "LAUNCHER_SSH_CONFIG": str(clean_bed.ssh_config)})
