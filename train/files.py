"""Open regular files only: opening or reading a pipe would wait for a writer."""

from __future__ import annotations

import os
import stat
from pathlib import Path

FLAGS = (
    os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
)  # O_NONBLOCK: opening a pipe does not wait; no effect on regular files


def open_regular(path: str | Path) -> int:
    """Open a file for reading; return its descriptor.

    Raises:
        OSError: the file cannot be opened, or is a pipe, a device or a folder.
    """
    descriptor = os.open(path, FLAGS)
    try:
        _regular_size(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: Path) -> None:
    """Raise OSError like `open_regular`."""
    os.close(open_regular(path))


def read_regular(path: str | Path) -> bytes:
    """Read a file. Faster than a file object, which matters for small images.

    Raises:
        OSError: see `open_regular`; or the file cannot be read.
    """
    descriptor = os.open(path, FLAGS)
    try:
        size = _regular_size(descriptor, path)
        data = os.read(descriptor, size)
        while len(data) < size and (more := os.read(descriptor, size - len(data))):
            data += more
        return data
    finally:
        os.close(descriptor)


def _regular_size(descriptor: int, path: str | Path) -> int:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "not a regular file", str(path))
    return status.st_size


def amount(size: float) -> str:
    """Return a number of bytes as text: `1.2 GB`, `46.8 MB`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
