"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bed import cluster
from tests.bed.bed import Bed
from tests.e2e.cli import Cli
from tests.e2e.scene import Scene


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """The launcher in an empty project, with empty caches."""
    project = tmp_path / "project"
    project.mkdir()
    return Cli(project, {"XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "200"})


@pytest.fixture
def home_cli(cli: Cli, tmp_path: Path) -> Iterator[Cli]:
    """The launcher with a temporary home folder, so that leftovers can be found."""
    home = tmp_path / "home"
    home.mkdir()
    local = Cli(cli.cwd, {**cli.env, "HOME": str(home)})
    yield local
    local("down", "--all", code=None)


@pytest.fixture
def bed_cli(cli: Cli, clean_bed: Bed) -> Cli:
    """The launcher with the bed's ssh config; the bed is swept before and after."""
    return Cli(cli.cwd, {**cli.env, "LAUNCHER_SSH_CONFIG": str(clean_bed.ssh_config)})


@pytest.fixture
def scene(request: pytest.FixtureRequest, cli: Cli, bed: Bed) -> Iterator[Scene]:
    """A scene with as many nodes as its parameter says, swept before and after."""
    count = int(request.param)
    if count > len(bed.nodes):
        cluster.up(bed.settings, count)
        bed = Bed.attach(bed.settings)
    nodes = bed.nodes[:count]
    bed.sweep(*nodes)
    yield Scene(Cli(cli.cwd, {**cli.env, "LAUNCHER_SSH_CONFIG": str(bed.ssh_config)}), bed, nodes)
    bed.sweep(*nodes)
