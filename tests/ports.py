"""TCP ports of this machine, for tests that run concurrently, also in several sessions of pytest."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import socket
import tempfile
from collections import deque
from pathlib import Path
from typing import IO

BLOCK = 16  # consecutive ports: with min_nodes, a run of plain processes uses one per node, and a pool one per variant
_RANGE = range(10_000, 18_000, BLOCK)  # below the ephemeral ports and those of tests/slurm
_FOLDER = Path(tempfile.gettempdir()) / f"launcher-test-ports-{os.getuid()}"
# Closing one releases its lock: the test that got the block has ended by then.
_TAKEN: deque[IO[bytes]] = deque(maxlen=32)
_NEXT = itertools.count(random.randrange(len(_RANGE)))


def free_port() -> int:
    """Return the first of BLOCK consecutive ports on which nothing listens, and which no other test gets.

    Unlike a port that the kernel chooses for a socket which is then closed, it stays free until the test uses it.
    """
    _FOLDER.mkdir(exist_ok=True)
    for index in itertools.islice(_NEXT, len(_RANGE)):
        first = _RANGE[index % len(_RANGE)]
        lock = (_FOLDER / str(first)).open("wb")
        with contextlib.suppress(OSError):  # taken by another process, or in use by a program
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for port in range(first, first + BLOCK):
                with socket.socket() as probe:
                    probe.bind(("", port))
            _TAKEN.append(lock)
            return first
        lock.close()
    raise AssertionError(f"no block of {BLOCK} free ports is left in {_RANGE}")
