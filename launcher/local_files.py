"""Atomic writes to local files, which another process may read at any time."""

from __future__ import annotations

import secrets
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader never sees a partial file. Raises OSError."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
