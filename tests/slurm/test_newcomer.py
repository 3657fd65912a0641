"""A new user's first run on a cluster whose Python has the libraries but not the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.e2e.cli import Cli
from tests.e2e.newcomer import bare, installed, newcomer, settings, wheel
from tests.slurm.bed import SlurmBed

__all__ = ["bare", "installed", "wheel"]


@pytest.mark.slow  # e2e/test_newcomer.py trains in processes and in containers
@pytest.mark.timeout(400)
def test_the_job_that_init_writes_trains_on_slurm(slurm: SlurmBed, installed: Path, bare: Path, cli: Cli) -> None:
    file = Path(cli.env["XDG_CONFIG_HOME"], "launcher", "settings.yaml")
    clusters = yaml.safe_load(file.read_text())["clusters"]
    file.write_text(yaml.safe_dump({"clusters": {"hpc": {**clusters["hpc"], "python": str(bare)}}}))
    new = newcomer(installed, cli.cwd, cli.env)
    done = new("up", "job.yaml", *settings(runtime="process", nodes="2", env="{OMP_NUM_THREADS: 1}"), "--on", "hpc")
    assert "Epoch: [1] val" in done.stdout
    assert new.result()["state"] == "done"
