"""Runs a command and ends all that it has started, once the command or the caller is gone.

    python -m bench.gpu_keeper LIFELINE COMMAND ...

LIFELINE is the number of an inherited pipe, which the caller keeps open as long as it lives. A check may start
processes in sessions of their own, and the caller may be killed: this process adopts orphans, so it finds them all.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

SET_CHILD_SUBREAPER = 36  # linux/prctl.h
GRACE = 10.0  # seconds for processes that SIGKILL does not end at once, stuck in a driver


def main(lifeline: int, command: list[str]) -> int:
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.set_inheritable(lifeline, False)
    child = subprocess.Popen(command, close_fds=False)
    select.select([lifeline, os.pidfd_open(child.pid)], [], [])
    end_descendants()
    code = child.wait()
    return code if code >= 0 else 128 - code  # as in a shell


def end_descendants() -> None:
    """Kill until none is left."""
    until = time.monotonic() + GRACE
    while (found := descendants(os.getpid())) and time.monotonic() < until:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # no event tells that a grandchild has ended, or that an orphan was adopted


def descendants(root: int) -> set[int]:
    """Return the live descendants of a process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(entry.name)] = int(parent)
    found, above = set[int](), {root}
    while above:
        above = {pid for pid, parent in parents.items() if parent in above} - found
        found |= above
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
