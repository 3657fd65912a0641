"""A Slurm for all tests of a session, and the launcher with a settings file that names it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.bed.fixtures import unavailable
from tests.bed.settings import BedUnavailable
from tests.e2e.cli import Cli
from tests.slurm.bed import SlurmBed


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmBed]:
    """If this machine cannot run it, the tests are skipped, or fail if LAUNCHER_BED_REQUIRED is set."""
    bed = SlurmBed.from_environment()
    try:
        bed.up(may_install=bool(os.environ.get("LAUNCHER_BED_REQUIRED")))
    except BedUnavailable as error:
        unavailable(str(error))
    yield bed
    bed.down()


@pytest.fixture
def cli(slurm: SlurmBed, tmp_path: Path) -> Iterator[Cli]:
    """The launcher in an empty project. The queue must be empty afterwards."""
    made = user(slurm, tmp_path)
    yield made
    left = [job for job in slurm.jobs() if " COMPLETING " not in job]
    for job in left:
        slurm("scancel", job.split()[0], check=False)
    assert not left, f"left in the queue: {left}"


def user(slurm: SlurmBed, folder: Path) -> Cli:
    """Return the launcher of another user with a separate project folder and the same account."""
    project = folder / "project"
    project.mkdir(parents=True)
    settings = folder / "config" / "launcher" / "settings.yaml"
    settings.parent.mkdir(parents=True)
    hpc = {"kind": "slurm", "login": "local", "workdir": str(slurm.shared), "gpus": 0, "python": sys.executable}
    others = {"far": {**hpc, "login": "login"}, "wrong": {**hpc, "partition": "missing"}}
    others["plain"] = {key: value for key, value in hpc.items() if key != "gpus"}
    others["oci"] = {**hpc, "container": "oci", "python": "python3"}
    settings.write_text(yaml.safe_dump({"clusters": {"hpc": hpc, **others}}))
    settings.chmod(0o600)
    own = {"XDG_CONFIG_HOME": str(folder / "config"), "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200"}
    return Cli(project, {**own, **slurm.variables, "LAUNCHER_SSH_CONFIG": str(slurm.ssh_config)})
