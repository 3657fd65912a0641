"""Local files that another process may read, replace or write at any time: atomic writes, safe opening, locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

APPEND = os.O_RDWR | os.O_CREAT | os.O_APPEND
WRITE = os.O_RDWR | os.O_CREAT


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader never sees a partial file. Raises OSError with the file's name."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a write has no name


def open_regular(path: Path | str, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a regular file or a link to one; a new file gets mode 0600. Raises OSError."""
    return os.fdopen(descriptor_of(path, flags), "rb" if flags == os.O_RDONLY else "r+b")


def read_end(path: str, most: int, start: int = 0) -> bytes:
    """Return the end of a regular file: at most so many bytes, none before `start`; b"" if it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - most))
            return file.read(most)
    except OSError:
        return b""


def descriptor_of(path: Path | str, flags: int) -> int:
    """Return the file descriptor; otherwise like open_regular.

    Other types are refused because opening a FIFO could block and a device may be endless.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):  # of the open file: the file checked is the file used
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


@contextmanager
def locked(file: Path) -> Iterator[int]:
    """Lock a file exclusively and yield its descriptor, for reading and writing. A missing file is created."""
    try:
        opened = descriptor_of(file, WRITE)
    except FileNotFoundError:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = descriptor_of(file, WRITE)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield opened
    finally:
        os.close(opened)


def parse_object(text: bytes | str) -> dict[str, Any] | None:
    """Return a JSON object; None for anything else, as the text comes from programs and nodes."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
