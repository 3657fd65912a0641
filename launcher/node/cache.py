"""Small JSON answers kept on the caller's side, so that a second `up` asks less. Losing them costs only time."""

from __future__ import annotations

import hashlib
import json
import os
import time
from typing import Any

from launcher.local_files import write_atomic
from launcher.model.home import cache_folder


def key(*parts: Any) -> str:
    """A name for an answer: the digest of everything that it depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def get(kind: str, name: str, max_age: float | None = None) -> Any:
    """The answer kept under this name; None if there is none, or it is unreadable or older than `max_age` seconds."""
    path = cache_folder(os.environ) / kind / f"{name}.json"
    try:
        if max_age is not None and not 0 <= time.time() - path.stat().st_mtime < max_age:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def put(kind: str, name: str, answer: Any) -> None:
    """Keep an answer. A folder that cannot be written is no reason to fail."""
    path = cache_folder(os.environ) / kind / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(answer, sort_keys=True).encode())
    except OSError:
        return
