"""Opening what is in runs/, where a user or a program may have put anything in place of a file or folder."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from launcher.errors import UsageError

APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND
WRITE = os.O_RDWR | os.O_CREAT


def open_regular(path: Path | str, flags: int = os.O_RDONLY) -> BinaryIO:
    """A regular file, or what a link to one leads to; a new one has mode 0600. Raises OSError."""
    return os.fdopen(descriptor_of(path, flags), "rb" if flags == os.O_RDONLY else "r+b")


def descriptor_of(path: Path | str, flags: int) -> int:
    """As open_regular.

    Opening a FIFO would wait for its other end, and a device may have no end.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):  # of the open file: the file checked is the file used
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def not_a_folder(path: Path) -> str:
    """Why `path` is there and not a folder, such as a link to a disk that is not mounted; "" where all is well."""
    if path.is_dir() or not (path.exists() or path.is_symlink()):
        return ""
    if not path.is_symlink():
        return "is not a folder"
    return f"is a link to {path.readlink()}, which {'is not a folder' if path.exists() else 'does not exist'}"


def require_folder(path: Path) -> None:
    """Raises UsageError where something else has its place; that it is missing is no error."""
    if what := not_a_folder(path):
        linked = path.is_symlink()
        fix = "mount or make that folder, or remove the link" if linked else "move it: records of runs go there"
        raise UsageError(str(path), what, fix)
