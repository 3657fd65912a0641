"""Safe opening of files in runs/, in which a user or a program may have replaced any file or folder."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from launcher.errors import UsageError
from launcher.records.paths import as_shown

APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND
WRITE = os.O_RDWR | os.O_CREAT


def open_regular(path: Path | str, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a regular file or a link to one; a new file gets mode 0600. Raises OSError."""
    return os.fdopen(descriptor_of(path, flags), "rb" if flags == os.O_RDONLY else "r+b")


def descriptor_of(path: Path | str, flags: int) -> int:
    """Return the file descriptor; otherwise like open_regular.

    Other types are refused because opening a FIFO could block and a device may be endless.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):  # of the open file: the file checked is the file used
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def not_a_folder(path: Path) -> str:
    """Return why an existing `path` is not a folder, such as a link to an unmounted disk, else ""."""
    if not (path.exists() or path.is_symlink()) or path.is_dir():  # in this order: another run may just create it
        return ""
    if not path.is_symlink():
        return "is not a folder"
    return f"is a link to {path.readlink()}, which {'is not a folder' if path.exists() else 'does not exist'}"


def require_folder(path: Path) -> None:
    """Raise UsageError if `path` exists and is not a folder. A missing folder is not an error."""
    if what := not_a_folder(path):
        linked = path.is_symlink()
        fix = "mount or create that folder, or remove the link" if linked else "move it: runs are recorded here"
        raise UsageError(str(as_shown(path)), what, fix)
