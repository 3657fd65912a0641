"""One launcher at a time starts the variants of a sweep: another one would start those again that the first one has."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.errors import UsageError
from launcher.local_files import WRITE, descriptor_of
from launcher.model.plan import RunId
from launcher.records.sweeps import lock_of


@contextmanager
def in_turn(file: Path) -> Iterator[None]:
    """Wait for the lock of this file and hold it. Where no lock can be had, nothing is held."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = _take(file, fcntl.LOCK_EX)
    except OSError:
        yield
        return
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(lock)


@contextmanager
def alone(group: RunId) -> Iterator[None]:
    """Hold the sweep; the kernel releases it when the process ends. Raises UsageError if another launcher holds it.

    Where no lock can be had (a full disk, a file system without locks), nothing is held.
    """
    file = lock_of(group)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = _take(file)
    except BlockingIOError:
        what = "another launcher runs its variants: a second one would start them again"
        fix = f"wait for it, or press Ctrl-C there; its process has opened {file}"
        raise UsageError(f"sweep {group}", what, fix) from None
    except OSError:
        yield
        return
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(lock)


def _take(file: Path, how: int = fcntl.LOCK_EX | fcntl.LOCK_NB) -> int:
    """Return a descriptor of the locked file. Raises OSError; with `how`, BlockingIOError if another process has it."""
    while True:
        lock = descriptor_of(file, WRITE)
        try:
            try:
                fcntl.flock(lock, how)
                there = os.fstat(lock).st_nlink
            except BlockingIOError:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # fails unless all the others only look
                there = 0
        except OSError:
            os.close(lock)
            raise
        if there:
            return lock
        os.close(lock)  # who held it has removed it since it was opened, or `runs` looked whether it is held
