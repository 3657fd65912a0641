"""Opening files that may be anything: only regular ones, since to open or read a pipe waits for a writer."""

from __future__ import annotations

import os
import stat
from pathlib import Path

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # the last: to open a pipe does not wait; nothing on regular files


def open_regular(path: str | Path) -> int:
    """A descriptor of the file, for reading.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a folder.
    """
    descriptor = os.open(path, FLAGS)
    try:
        _regular_size(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(path: Path) -> None:
    """Raises OSError as `open_regular`."""
    os.close(open_regular(path))


def read_regular(path: str | Path) -> bytes:
    """The file's content; cheaper than by a file object, which counts for small images.

    Raises:
        OSError: as `open_regular`, or it cannot be read.
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
