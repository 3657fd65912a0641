"""The one writer of files in runs/ that come from nodes, for the follower and for the collector.

append() extends a file at its end, under a lock of that file that is held for one write: any number of launchers may
follow and collect the same run. What they read of a node's file is the same, so each byte is kept once, whoever comes
first. A secret is masked by every launcher that knows its value in all that it reads, also where another launcher has
written it; nothing is ever unmasked.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.records.files import WRITE, descriptor_of
from launcher.records.masking import Masker

NO_MASK = Masker()
ABANDONED = 3600.0  # seconds without a write, after which a temporary file was left by a kill


@contextmanager
def locked(file: Path) -> Iterator[int]:
    """The file's descriptor, to be read and written, while no other has it. It is made where it is missing."""
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


def append(file: Path, offset: int, data: bytes, mask: Masker = NO_MASK) -> bool:
    """Extend `file` by what `data`, the bytes of a node's file from `offset` on, has beyond its end.

    A secret may begin in what is here already: so much of it is masked with what comes. False, and nothing is written,
    where bytes before `offset` are missing here. Raises OSError; the file is then as long as it was.
    """
    with locked(file) as here:
        end = os.fstat(here).st_size
        if end < offset:
            return False
        start = max(0, offset - max(0, mask.longest - 1))
        old = os.pread(here, min(end, offset + len(data)) - start, start)
        new = mask.in_place(old + data[end - offset :])
        if new.startswith(old):  # nothing in it has to be masked
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
    """Write a file anew; the size of it. It is complete or as it was: a temporary file takes its name.

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
