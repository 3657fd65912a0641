"""The launcher as a user runs it; conftest.py of a folder makes these fixtures available to its tests."""

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
    if (home / ".launcher").exists():
        local("down", "--all", code=None)


@pytest.fixture(scope="session")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the launcher knows about the bed's images and engines, which few tests are about; those have their own."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture
def bed_cli(cli: Cli, clean_bed: Bed, caches: Path) -> Cli:
    """The launcher with the bed's ssh config; the bed was swept."""
    own = {"XDG_CACHE_HOME": str(caches), "LAUNCHER_SSH_CONFIG": str(clean_bed.ssh_config)}
    return Cli(cli.cwd, {**cli.env, **own})


@pytest.fixture
def scene(request: pytest.FixtureRequest, cli: Cli, bed: Bed, caches: Path) -> Scene:
    """A scene with as many nodes as its parameter says, swept."""
    count = int(request.param)
    if count > len(bed.nodes):
        cluster.up(bed.settings, count)
        bed = Bed.attach(bed.settings)
    nodes = bed.nodes[:count]
    bed.sweep(*nodes)
    own = {"XDG_CACHE_HOME": str(caches), "LAUNCHER_SSH_CONFIG": str(bed.ssh_config)}
    return Scene(Cli(cli.cwd, {**cli.env, **own}), bed, nodes)
