"""What is recorded of a sweep beside its runs: all its variants; and whether a launcher of this machine starts them."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path

from launcher.errors import UsageError
from launcher.job.overrides import short_commit
from launcher.local_files import open_regular, write_atomic
from launcher.model import checked
from launcher.model.home import cache_folder
from launcher.model.host import cluster_name
from launcher.model.plan import CODE, KnownSweep, Membership, RunId, is_run_id, plain
from launcher.records.masking import Masker
from launcher.records.paths import RUNS
from launcher.records.store import Record, read_json

_FORM = {"variants": [str], "file": str, "options": [str], "commits": {}, "settings": {}}


def keep(group: Membership, mask: Masker, runs: Path) -> None:
    """Record the variants of a run's sweep, masked as the run's own is. Raises OSError."""
    if group.sweep is None:
        return
    file, fields = _file(group.group, runs), mask.deep(plain(group.sweep))
    if read_json(file) != fields:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(file, json.dumps(fields, indent=2).encode())


def known(group: str, runs: Path = RUNS) -> KnownSweep | None:
    """Return what was recorded when a run of the sweep was started last; None: by an older launcher, or elsewhere."""
    found = checked.fitting(read_json(_file(group, runs)) or {}, _FORM) if is_run_id(group) else {}
    if "variants" not in found:
        return None
    commits = {text: code for text, code in found.get("commits", {}).items() if isinstance(code, str)}
    options, settings = tuple(found.get("options", ())), found.get("settings", {})
    return KnownSweep(tuple(found["variants"]), found.get("file", ""), options, commits, settings)


def recorded(runs: Path = RUNS) -> list[str]:
    """Return the IDs of the sweeps whose variants are recorded here."""
    return sorted(file.stem for file in _file("", runs).parent.glob("*.json") if is_run_id(file.stem))


def not_started(group: str, variants: Collection[str], runs: Path = RUNS) -> list[Membership]:
    """Return the memberships of the recorded variants of a sweep other than these, in its order."""
    if (sweep := known(group, runs)) is None:
        return []
    asked = {f"{CODE}={short_commit(of)}": text for text, of in sweep.commits.items() if not of.startswith(text)}
    left = [name for name in sweep.variants if name not in variants]
    return [Membership(group, name, asked=asked.get(name.partition(" ")[0], "")) for name in left]


def in_order(group: str, names: Iterable[str], runs: Path = RUNS) -> list[str]:
    """Return these variants in the order of their sweep; those of which it is not recorded as they are, last."""
    at = {name: index for index, name in enumerate(sweep.variants)} if (sweep := known(group, runs)) else {}
    return sorted(names, key=lambda name: at.get(name, len(at)))


def resume_command(record: Record, group: str) -> str:
    """Return the command that runs what is left of a sweep. record: of one of its runs."""
    on = next((name for node in record.nodes() if (name := cluster_name(node.host)) is not None), None)
    return command_of(known(group, record.paths.root.parent), group, on)


def command_of(sweep: KnownSweep | None, group: str, on: str | None = None) -> str:
    """Return the command that resumes a sweep. sweep: None if it is not known. on: the cluster on which it runs."""
    file, options = ((sweep.file or "JOB"), sweep.options) if sweep else ("JOB", ())
    return shlex.join(["launcher", "up", file, *options, *(["--on", on] if on else []), "--resume", group])


def lock_of(group: RunId) -> Path:
    """Return the file that a launcher has locked while it starts the variants of this sweep. Raises UsageError."""
    return cache_folder(os.environ) / "sweeps" / f"{group}.lock"


def is_run_here(group: str) -> bool:
    """Return whether a launcher of this machine starts the variants of the sweep. False if that cannot be known."""
    try:
        with open_regular(lock_of(group)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, UsageError):
        return False
    return False


def _file(group: str, runs: Path) -> Path:
    return runs / ".sweeps" / f"{group}.json"
