"""Small JSON answers kept on the caller's side, so that a second `up` asks less. Losing them costs only time."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any


def folder() -> Path:
    """$XDG_CACHE_HOME/launcher, by default ~/.cache/launcher."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "launcher"


def key(*parts: Any) -> str:
    """A name for an answer: the digest of everything that it depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def get(kind: str, name: str, max_age: float | None = None) -> Any:
    """The answer kept under this name; None if there is none, or it is unreadable or older than `max_age` seconds."""
    path = folder() / kind / f"{name}.json"
    try:
        if max_age is not None and not 0 <= time.time() - path.stat().st_mtime < max_age:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def put(kind: str, name: str, answer: Any) -> None:
    """Keep an answer. A folder that cannot be written is no reason to fail."""
    path = folder() / kind / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(answer, sort_keys=True).encode())
    except OSError:
        return


def write_atomic(path: Path, data: bytes) -> None:
    """Whole or not at all: a reader never sees half a file. Raises OSError."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
