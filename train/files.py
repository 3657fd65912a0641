"""Opening files that may be anything: only regular ones, since to open or read a pipe waits for a writer."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def open_regular(path: str | Path) -> int:
    """A descriptor of the file, for reading.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a folder.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # does not wait; no effect on regular files
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file", str(path))
    return descriptor


def check_regular(path: Path) -> None:
    """Raises OSError as `open_regular`."""
    os.close(open_regular(path))


def read_regular(path: str | Path) -> bytes:
    """The file's content.

    Raises:
        OSError: as `open_regular`, or it cannot be read.
    """
    with open(open_regular(path), "rb") as file:
        return file.read()
