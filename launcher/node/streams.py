"""A command that runs on a node while its output is read: as pushed as the node sends it."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

PIECE = 1 << 16


class CommandStream(Protocol):
    """A running command with its three streams. Not for several threads at once, but for end()."""

    def send(self, data: bytes) -> None:
        """Write to its stdin. Raises NodeUnreachable, NodeUnfit when it cannot be told any more."""

    def end_input(self) -> None: ...

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        """What came on stdout and on stderr; both empty when nothing did within `timeout` seconds; None at the end.

        Raises NodeUnreachable when the connection is lost.
        """

    def end(self) -> None:
        """End its stdin, and it, if it has not ended: receive() comes to the end of what it said."""

    def close(self) -> None:
        """The same, and let go of its streams."""


class LocalStream:
    """A command on this machine, in a session of its own: a Ctrl-C is not for it."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Raises OSError when it cannot be started."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin = self._process.stdin
        self._selector = selectors.DefaultSelector()
        for place, stream in enumerate((self._process.stdout, self._process.stderr)):
            self._selector.register(stream, selectors.EVENT_READ, place)

    def send(self, data: bytes) -> None:
        with suppress(BrokenPipeError):  # it has ended; receive() says so
            self._stdin.write(data)

    def end_input(self) -> None:
        self._stdin.close()

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        if not self._selector.get_map():
            return None
        found = [b"", b""]
        for key, _ in self._selector.select(timeout):
            piece = os.read(key.fd, PIECE)
            if not piece:
                self._selector.unregister(key.fileobj)
            found[key.data] = piece
        if not any(found) and not self._selector.get_map():
            return None
        return found[0], found[1]

    def end(self) -> None:
        self._stdin.close()
        with suppress(ProcessLookupError):  # its own children are in its group
            os.killpg(self._process.pid, signal.SIGTERM)

    def close(self) -> None:
        self.end()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._selector.close()
