"""A connection to a node's Docker engine: `docker system dial-stdio` on an ssh channel.

It (Docker CLI >= 18.09) finds the engine as the ssh user's `docker` does: environment, context.
"""

from __future__ import annotations

import paramiko

from launcher.node.docker import DIAL_STDIO
from launcher.node.ssh.commands import Session, Ssh

_EXIT_TIMEOUT = 5.0
_PIECE = 1 << 16


class DialFailed(ConnectionError):  # noqa: N818 - inside launcher.node only
    """`docker system dial-stdio` ended before the engine said anything: its exit code and its words."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(code, words)
        self.code = code
        self.words = words


class ChannelWire:
    """A channel that runs dial-stdio."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._channel: paramiko.Channel = session.channel
        self._heard = False

    @property
    def idle(self) -> bool:
        return not (self._channel.closed or self._channel.eof_received or self._channel.recv_ready())

    def sendall(self, data: bytes) -> None:
        """Raises DialFailed, ConnectionResetError, TimeoutError."""
        try:
            # sendall copies all that is left for every packet: small pieces keep that linear
            for start in range(0, len(data), _PIECE):
                self._channel.sendall(data[start : start + _PIECE])
        except (OSError, EOFError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise self._failure(error) from error

    def recv(self, size: int) -> bytes:
        """Raises DialFailed, ConnectionResetError, TimeoutError."""
        data = self._channel.recv(size)
        if not data and not self._heard:
            raise self._failure(EOFError("no answer"))
        self._heard = True
        return data

    def settimeout(self, seconds: float | None) -> None:
        self._channel.settimeout(seconds)

    def close(self) -> None:
        self._session.close()

    def _failure(self, error: Exception) -> Exception:
        """What dial-stdio said when it ended without an answer; the bare end where it said nothing."""
        if not self._channel.status_event.wait(_EXIT_TIMEOUT) or not self._channel.get_transport().is_active():
            return ConnectionResetError(f"the connection to the engine was lost: {error}")
        words = b""
        while piece := self._channel.recv_stderr(4096):
            words += piece
        return DialFailed(self._channel.exit_status, words.decode(errors="replace").strip())


def dial(ssh: Ssh) -> ChannelWire:
    """Raises NodeUnreachable."""
    return ChannelWire(ssh.command(DIAL_STDIO))
