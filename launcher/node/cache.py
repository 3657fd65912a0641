"""Small JSON values cached on this machine, so that a second `up` sends fewer requests. They can be deleted safely."""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import Any

from launcher.local_files import write_atomic
from launcher.model.home import cache_folder


def key(*parts: Any) -> str:
    """Return a cache key: the digest of everything that the value depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def get(kind: str, name: str, max_age: float | None = None) -> Any:
    """Return the cached value; None if it is missing, unreadable or older than `max_age` seconds."""
    path = cache_folder(os.environ) / kind / f"{name}.json"
    try:
        if max_age is not None and not 0 <= time.time() - path.stat().st_mtime < max_age:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def put(kind: str, name: str, value: Any) -> None:
    """Store a value. Does nothing if the folder is not writable."""
    path = cache_folder(os.environ) / kind / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(value, sort_keys=True).encode())
    except OSError:
        return
