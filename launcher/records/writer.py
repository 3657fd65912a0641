"""Writes the files in runs/ that come from nodes, for the follower and the collector.

append() extends a file under a lock that is held for one write, so any number of launchers may follow and collect the
same run. They all read the same bytes from a node, so each byte is written once, by the first launcher. Each launcher
masks the secrets that it knows in all data that it reads, also in data that another launcher has already written.
"""

from __future__ import annotations

import glob
import os
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from launcher.local_files import locked
from launcher.records.masking import Masker

NO_MASK = Masker()
ABANDONED = 3600.0  # seconds without a write after which a temporary file is considered abandoned


def append(file: Path, offset: int, data: bytes, mask: Masker = NO_MASK) -> bool:
    """Extend `file` by the part of `data`, the bytes of a node's file from `offset`, that is beyond its end.

    A secret may start in the existing bytes: these are masked too. Returns False and writes nothing if bytes before
    `offset` are missing in `file`. Raises OSError; the length of the file is then unchanged.
    """
    with locked(file) as here:
        end = os.fstat(here).st_size
        if end < offset:
            return False
        start = max(0, offset - max(0, mask.longest - 1))
        old = os.pread(here, min(end, offset + len(data)) - start, start)
        new = mask.in_place(old + data[end - offset :])
        if new.startswith(old):  # nothing in the existing bytes was masked
            start, new = start + len(old), new[len(old) :]
        try:
            while new:
                written = os.pwrite(here, new, start)
                start, new = start + written, new[written:]
        except OSError:
            os.ftruncate(here, end)
            raise
    return True


def replace(file: Path, pieces: Iterable[bytes], mtime: float, mask: Masker = NO_MASK) -> int:
    """Replace a file atomically, by renaming a temporary file, and return its size.

    mtime: seconds since the epoch. Raises OSError.
    """
    for part in file.parent.glob(f"{glob.escape(file.name)}.*.part"):
        with suppress(FileNotFoundError):
            if time.time() - part.stat().st_mtime > ABANDONED:
                part.unlink()
    part, size = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part"), 0
    try:
        for piece in pieces:
            append(part, size, piece, mask)
            size += len(piece)
        os.utime(part, (mtime, mtime))
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return size
