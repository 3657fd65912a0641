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
    with _held(file, _lock(file, fcntl.LOCK_EX)):
        yield


@contextmanager
def alone(group: RunId) -> Iterator[None]:
    """Hold the sweep; the kernel releases it when the process ends. Raises UsageError if another launcher holds it.

    Where no lock can be had (a full disk, a file system without locks), nothing is held.
    """
    file = lock_of(group)
    try:
        lock = _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        what = "another launcher runs its variants: a second one would start them again"
        fix = f"wait for it, or press Ctrl-C there; its process has opened {file}"
        raise UsageError(f"sweep {group}", what, fix) from None
    with _held(file, lock):
        yield


@contextmanager
def _held(file: Path, lock: int | None) -> Iterator[None]:
    """Remove the file at the end, which releases the lock."""
    try:
        yield
    finally:
        if lock is not None:
            file.unlink(missing_ok=True)
            os.close(lock)


def _lock(file: Path, how: int) -> int | None:
    """Return a descriptor of the locked file; None where no lock can be had. Raises as `_take` if another process has
    it.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return _take(file, how)
    except BlockingIOError:
        raise
    except OSError:
        return None


def _take(file: Path, how: int) -> int:
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
