"""A full disk, in the words of every system, engine, language and library."""

from __future__ import annotations

import errno
import re

from launcher.container_scripts.words import bounded
from launcher.faults.cause import Cause

FIX = "free some space there, or inodes (`df -i`); `launcher clean` removes old runs"
OUTPUT, ENGINE, DATA = "the output folder's disk", "the container engine's disk", "the data folder's disk"

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)  # of this machine, for its own errors; nodes run Linux: 28 and 122
# As Python, Rust and HDF5 print the number
_PRINTED = r"\[(?i:errno) N\]|\berrno = N\b|\(os error N\)|\bcode: N, kind"
NUMBER = _PRINTED.replace("N", "(?:28|122)")
AT_THE_END = r": (?:No space left on device|Disk quota exceeded|Quota exceeded)$"  # strerror(3) of glibc and musl
# Go, macOS, SQLite, apt
_WORDS = re.compile(
    rf"{NUMBER}|: quota exceeded\s*$|no space left on device|\bdis[ck] quota exceeded|database or disk is full"
    r"|enough free space in /",
    re.IGNORECASE | re.MULTILINE,
)
_QUOTA = re.compile(f"quota exceeded|{_PRINTED.replace('N', '122')}", re.IGNORECASE)


def is_full(problem: str | OSError) -> bool:
    """Whether an error of this machine, or the message of a command or an engine, says that a disk or a quota is full.

    Not for the output of a user's program, which may use these words for something else: see the table.
    """
    if isinstance(problem, OSError) and problem.errno is not None:
        return problem.errno in _NUMBERS
    return _WORDS.search(bounded(str(problem))) is not None


def _is_quota(problem: str | OSError) -> bool:
    if isinstance(problem, OSError) and problem.errno is not None:
        return problem.errno == errno.EDQUOT
    return _QUOTA.search(str(problem)) is not None


def full(which: str = "the disk", said: str | OSError = "") -> Cause:
    """Return the cause. which: the disk, as the reader knows it: "the output folder's disk". said: the error."""
    if _is_quota(said):
        return Cause(f"the quota on {which} is used up", "`quota -s` shows it; `launcher clean` removes old runs")
    return Cause(f"{which} is full", FIX)


def no_inodes(which: str) -> Cause:
    """Return the cause if a disk has space left, but no inode for another file."""
    return Cause(f"{which} has no inodes left (`df -i`)", "remove files there; `launcher clean` removes old runs")
