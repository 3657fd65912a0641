"""TCP ports of this machine, for tests that run concurrently, also in several sessions of pytest and of other users."""

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
_FOLDER = Path(tempfile.gettempdir()) / "launcher-test-ports"
# Closing one releases its lock: the test that got the block has ended by then.
_TAKEN: deque[IO[bytes]] = deque(maxlen=32)
_NEXT = itertools.count(random.randrange(len(_RANGE)))


def free_port() -> int:
    """Return the first of BLOCK consecutive ports on which nothing listens, and which no other test gets.

    Unlike a port that the kernel chooses for a socket which is then closed, it stays free until the test uses it.
    """
    with contextlib.suppress(FileExistsError):
        _FOLDER.mkdir()
        _FOLDER.chmod(0o1777)
    for index in itertools.islice(_NEXT, len(_RANGE)):
        first = _RANGE[index % len(_RANGE)]
        lock = _opened(_FOLDER / str(first))
        with contextlib.suppress(OSError):  # taken by another process, or in use by a program
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for port in range(first, first + BLOCK):
                with socket.socket() as probe:
                    probe.bind(("", port))
            _TAKEN.append(lock)
            return first
        lock.close()
    raise AssertionError(f"no block of {BLOCK} free ports is left in {_RANGE}")


def _opened(file: Path) -> IO[bytes]:
    """Open a file that may be another user's, who can lock it too: for reading."""
    try:
        return file.open("rb")
    except FileNotFoundError:
        return os.fdopen(os.open(file, os.O_RDONLY | os.O_CREAT, 0o644), "rb")
