"""A connection to a node's Docker engine: `docker system dial-stdio` on an ssh channel.

It (Docker CLI >= 18.09) finds the engine as the ssh user's `docker` does: environment, context.
"""

from __future__ import annotations

import io
from typing import Any

import paramiko

from launcher.node.docker import DIAL_STDIO
from launcher.node.ssh.node import Session, Ssh

_EXIT_TIMEOUT = 5.0


class DialFailed(ConnectionError):  # noqa: N818 - inside launcher.node only
    """`docker system dial-stdio` ended before the engine said anything: its exit code and its words."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(code, words)
        self.code = code
        self.words = words


class ChannelSocket(io.RawIOBase):
    """A channel that runs dial-stdio, as the socket that http.client expects."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._channel: paramiko.Channel = session.channel
        self._heard = False
        self._readers = 0
        self._ending = False

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            for start in range(0, len(view), 1 << 16):
                self._channel.sendall(bytes(view[start : start + (1 << 16)]))
        except (OSError, EOFError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise self._failure(error) from error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._channel.recv(len(buffer))
        if not data and not self._heard:
            raise self._failure(EOFError("no answer"))
        self._heard = True
        buffer[: len(data)] = data
        return len(data)

    def makefile(self, *_: object, **__: object) -> io.BufferedReader:
        """http.client makes one a response and closes it after; the channel lives on for the next request."""
        self._readers += 1
        return _Reader(self, 1 << 16)

    def settimeout(self, timeout: float | None) -> None:
        self._channel.settimeout(timeout)

    def fileno(self) -> int:
        raise io.UnsupportedOperation("a channel has no file")  # nobody may select() on it

    @property
    def idle(self) -> bool:
        """Still open with nothing unread: fit for another request."""
        return not (self._channel.closed or self._channel.eof_received or self._channel.recv_ready())

    def reader_closed(self) -> None:
        self._readers -= 1
        if self._ending and self._readers <= 0:
            self._session.close()

    def close(self) -> None:
        """http.client closes its connection while a response without a length is still being read: wait for that."""
        self._ending = True
        if self._readers <= 0:
            self._session.close()
            super().close()

    def shutdown(self, _how: int) -> None:
        self._session.close()

    def _failure(self, error: Exception) -> Exception:
        """What dial-stdio said when it ended without an answer; the bare end where it said nothing."""
        if not self._channel.status_event.wait(_EXIT_TIMEOUT) or not self._channel.get_transport().is_active():
            return ConnectionResetError(f"the connection to the engine was lost: {error}")
        words = b""
        while piece := self._channel.recv_stderr(4096):
            words += piece
        return DialFailed(self._channel.exit_status, words.decode(errors="replace").strip())


class _Reader(io.BufferedReader):
    """One response: closing it leaves the channel open."""

    def __init__(self, source: ChannelSocket, size: int) -> None:
        super().__init__(source, size)
        self._source: ChannelSocket | None = source

    def close(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.reader_closed()

    @property
    def closed(self) -> bool:
        return self._source is None


def dial(ssh: Ssh) -> ChannelSocket:
    """Raises NodeUnreachable."""
    return ChannelSocket(ssh.command(DIAL_STDIO))
