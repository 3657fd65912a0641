"""Running programs on this machine, with errors that contain the program's output."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path


class CommandFailed(RuntimeError):  # noqa: N818
    """A program exited with a non-zero code; the message has its command line and its last lines."""


def run(
    argv: Sequence[str], *, check: bool = True, timeout: float = 300, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `argv` and captures both streams as text; raises CommandFailed unless `check` is false."""
    done = subprocess.run(list(argv), capture_output=True, text=True, timeout=timeout, input=stdin, check=False)
    if check and done.returncode:
        end = "\n".join((done.stderr + done.stdout).strip().splitlines()[-15:])
        raise CommandFailed(f"{' '.join(argv)}: exit {done.returncode}\n{end}")
    return done


def output(argv: Sequence[str], timeout: float = 300) -> str:
    """Standard output of `argv`, stripped; raises CommandFailed."""
    return run(argv, timeout=timeout).stdout.strip()


def succeeds(argv: Sequence[str], timeout: float = 60) -> bool:
    """Whether the program exists and exits with 0 in time."""
    try:
        return run(argv, check=False, timeout=timeout).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on this file, which is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
