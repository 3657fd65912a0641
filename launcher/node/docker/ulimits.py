"""Which limits an engine grants: tried once with a real container, remembered in the caller's cache.

An engine in a restricted container refuses memlock=-1 (`error setting rlimit`), and then no container starts at all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

Ulimits = tuple[tuple[str, int], ...]


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "launcher"


def cache_file(engine: tuple[str, str], wanted: Ulimits) -> Path:
    """engine: its own id and its version: another of either is tried anew."""
    name = hashlib.sha256(json.dumps([*engine, wanted]).encode()).hexdigest()[:32]
    return cache_folder() / "ulimits" / f"{name}.json"


def remembered(file: Path, wanted: Ulimits) -> Ulimits | None:
    """None where nothing, or nothing readable, is remembered."""
    try:
        names = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(names, list):
        return None
    return tuple(limit for limit in wanted if limit[0] in names)


def remember(file: Path, granted: Ulimits) -> None:
    """Raises OSError: a cache that cannot be written costs a second the next time, nothing else."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps([name for name, _ in granted]))
    temporary.replace(file)


def find(wanted: Ulimits, starts_with: Callable[[Sequence[tuple[str, int]]], bool]) -> Ulimits:
    """Those that are granted: all at once as a rule, one by one where that fails."""
    if starts_with(wanted):
        return wanted
    return tuple(limit for limit in wanted if starts_with((limit,)))
