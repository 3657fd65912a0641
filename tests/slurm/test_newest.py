"""The tests of this folder on Debian's newest Slurm; by default they use that of the machine's own Debian."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.e2e.cli import ROOT


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_newest_slurm() -> None:
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    bed = f"{own.get('LAUNCHER_BED_NAME', 'launcher-bed')}-newest"
    more = {"LAUNCHER_SLURM_SUITE": "forky", "LAUNCHER_BED_NAME": bed}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/slurm"],
        cwd=ROOT,
        env={**own, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
