"""Shell completion of run IDs, sweeps, job names and ssh aliases, from the local records and the ssh config."""

from __future__ import annotations

import os

from launcher.model.plan import is_run_id
from launcher.node.ssh.config import aliases
from launcher.records import sweeps
from launcher.records.paths import RUNS
from launcher.records.store import created, job_of


def runs(incomplete: str) -> list[str]:
    """Return job names, then the IDs of sweeps and of runs, the latest first. No record is read, as there may be many.

    Sweeps of older launchers have no file of their own, and are not offered.
    """
    known = [*sweeps.recorded(RUNS), *(path.name for path in (RUNS.iterdir() if RUNS.is_dir() else ()))]
    found = sorted(filter(is_run_id, known), key=created, reverse=True)
    return [name for name in (*dict.fromkeys(map(job_of, found)), *found) if name.startswith(incomplete)]


def hosts(incomplete: str) -> list[str]:
    """Complete the last one of `a,b`."""
    given, comma, last = incomplete.rpartition(",")
    known = aliases(os.environ.get("LAUNCHER_SSH_CONFIG"))
    return [f"{given}{comma}{alias}" for alias in known if alias.startswith(last) and alias not in given.split(",")]
