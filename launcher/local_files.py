"""Files of this machine, written so that another process may read them at any time."""

from __future__ import annotations

import secrets
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Whole or not at all: a reader never sees half a file. Raises OSError."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
