"""A command over ssh whose output is read as the node sends it."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence

from launcher.node.ssh.commands import Ssh
from launcher.node.ssh.handshake import has_ended
from launcher.node.streams import PIECE


class SshStream:
    """Implements CommandStream on one channel."""

    def __init__(self, ssh: Ssh, argv: Sequence[str]) -> None:
        """Raises NodeUnreachable."""
        command = shlex.join(argv)
        self._ssh = ssh
        self._session, _ = ssh.session(lambda channel: channel.exec_command(command))
        self._channel = self._session.channel
        self._ended_here = False
        self._wake = threading.Event()  # either stream has something, or its end
        self._channel.in_buffer.set_event(self._wake)
        self._channel.in_stderr_buffer.set_event(self._wake)

    def send(self, data: bytes) -> None:
        try:
            # sendall copies all that is left for every packet: small pieces keep that linear
            for start in range(0, len(data), PIECE):
                self._channel.sendall(data[start : start + PIECE])
        except (OSError, EOFError) as error:
            raise self._ssh.lost(error) from error

    def end_input(self) -> None:
        try:
            self._channel.shutdown_write()
        except (OSError, EOFError) as error:
            raise self._ssh.lost(error) from error

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        ended = self._channel.eof_received or self._channel.closed  # asked first: what the buffers hold came before it
        if not (self._channel.recv_ready() or self._channel.recv_stderr_ready()):
            if ended:
                if not self._ended_here and has_ended(self._channel.get_transport()):
                    raise self._ssh.lost(EOFError("while its files were read"))
                return None
            self._wake.wait(timeout)
        out = self._channel.recv(PIECE) if self._channel.recv_ready() else b""
        err = self._channel.recv_stderr(PIECE) if self._channel.recv_stderr_ready() else b""
        return out, err

    def end(self) -> None:
        self._ended_here = True
        self._session.close()

    def close(self) -> None:
        self._session.close()
