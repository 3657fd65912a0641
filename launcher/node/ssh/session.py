"""A channel of an ssh connection, and what a command on one comes to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

import paramiko


@dataclass(frozen=True)
class Done:
    """A command that has ended. `code` is -1 where a signal ended it. Times: of time.time(), here."""

    code: int
    out: bytes
    err: bytes
    started: float  # the server had taken the command, or it was sent to a shell that was waiting
    first: float  # the first byte of output came; the end where there was none

    @property
    def complaint(self) -> str:
        """What it wrote to stderr, else to stdout, short enough for an error message."""
        words = (self.err or self.out).decode(errors="replace").strip()
        return words if len(words) <= 600 else f"{words[:600]}..."


class Session:
    """A channel that counts against the connection's budget until it is closed."""

    def __init__(self, channel: paramiko.Channel, release: Callable[[], None]) -> None:
        self.channel = channel
        self._release: Callable[[], None] | None = release
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            release, self._release = self._release, None
        if release:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # it is gone with its connection
                self.channel.close()
            release()
