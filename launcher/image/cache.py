"""Small JSON answers kept on the caller's side, so that a warm `up` asks nothing twice. Losing them costs time only."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
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
    """The answer kept under this name, None where there is none or it is older than `max_age` seconds."""
    path = folder() / kind / f"{name}.json"
    try:
        if max_age is not None and not 0 <= time.time() - path.stat().st_mtime < max_age:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def put(kind: str, name: str, answer: Mapping[str, Any]) -> None:
    """Keep an answer; whole or not at all. A folder that cannot be written is no reason to fail."""
    path = folder() / kind / f"{name}.json"
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(answer, sort_keys=True), encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
