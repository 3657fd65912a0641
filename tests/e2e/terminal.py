"""Simulates a user at a terminal: types into a pseudo-terminal and reads its screen."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

from tests.e2e.cli import ROOT, Cli


class Person:
    """The launcher in a terminal of 100 columns and 30 lines."""

    def __init__(self, cli: Cli, *args: object) -> None:
        self._screen, inner = os.openpty()
        self.seen = ""
        self.resize(100, 30)

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(inner, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *map(str, args)],
            cwd=cli.cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **cli.env},
            stdin=inner,
            stdout=inner,
            stderr=inner,
            preexec_fn=take_terminal,  # noqa: PLW1509 - a test has no other threads
        )
        os.close(inner)

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._screen, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def sees(self, pattern: str, timeout: float = 60) -> re.Match[str]:
        """Waits until the pattern appears after what was seen before; fails with the whole screen."""
        deadline = time.monotonic() + timeout
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"{pattern!r} did not appear:\n{self.seen}"
            assert self._look(), f"the launcher ended before {pattern!r} appeared:\n{self.seen}"
        self.seen = self.seen[match.end() :]
        return match

    def end(self, timeout: float = 60) -> int:
        """Waits for the launcher to exit; returns its exit code."""
        deadline = time.monotonic() + timeout
        while self._look():
            assert time.monotonic() < deadline, f"the launcher did not exit:\n{self.seen}"
        os.close(self._screen)
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        """Sends SIGKILL, as the OOM killer does."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._screen)

    def close(self) -> None:
        """Closes the window, and waits for the launcher, which the kernel tells so."""
        os.close(self._screen)
        self.process.wait(timeout=60)

    def _look(self) -> bool:
        """Reads more output; False at the end."""
        if not select.select([self._screen], [], [], 0.2)[0]:
            return True
        try:
            piece = os.read(self._screen, 65536)
        except OSError:  # raised by Linux when the other side is closed
            return False
        self.seen += piece.decode(errors="replace")
        return bool(piece)
