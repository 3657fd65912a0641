"""A full disk, in the words of every system, engine, language and library."""

from __future__ import annotations

import errno
import re

from launcher.faults.cause import Cause

FIX = "free some space there; `launcher clean` removes old runs"

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)  # of this machine, for its own errors; nodes run Linux: 28 and 122
# As Python, Rust and HDF5 print the number
NUMBER = r"\[(?i:errno) (?:28|122)\]|\berrno = (?:28|122)\b|\(os error (?:28|122)\)|\bcode: (?:28|122), kind"
AT_THE_END = r": (?:No space left on device|Disk quota exceeded|Quota exceeded)$"  # strerror(3) of glibc and musl
# Go, macOS, SQLite, apt
_WORDS = re.compile(
    rf"{NUMBER}|: quota exceeded\s*$|no space left on device|\bdis[ck] quota exceeded|database or disk is full"
    r"|enough free space in /",
    re.IGNORECASE | re.MULTILINE,
)


def is_full(problem: str | OSError) -> bool:
    """Whether an error of this machine, or the message of a command or an engine, says that a disk or a quota is full.

    Not for the output of a user's program, which may use these words for something else: see the table.
    """
    if isinstance(problem, OSError) and problem.errno is not None:
        return problem.errno in _NUMBERS
    return _WORDS.search(str(problem)) is not None


OUTPUT, ENGINE, DATA = "the output folder's disk", "the container engine's disk", "the data folder's disk"


def full(which: str = "the disk") -> Cause:
    """Return the cause. which: the disk, as the reader knows it: "the output folder's disk"."""
    return Cause(f"{which} is full", FIX)
