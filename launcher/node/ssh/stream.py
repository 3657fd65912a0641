"""A command over ssh: its channel, and its three streams as the node sends them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import paramiko

from launcher.errors import NodeUnreachable
from launcher.node.machine import PIECE
from launcher.node.ssh.handshake import has_ended

_EXIT_TIMEOUT = 10.0  # seconds: the exit status comes right behind the end of the output


class SshStream:
    """Implements CommandStream, on a channel that counts against the connection's budget until it is closed."""

    def __init__(
        self,
        channel: paramiko.Channel,
        release: Callable[[], None],
        node: str,
        what: str,
        lost: Callable[[Exception], NodeUnreachable],
    ) -> None:
        """what: the command's first words. lost: makes the error for a connection that broke."""
        self.channel = channel
        self._release: Callable[[], None] | None = release
        self._lock = threading.Lock()
        self._node = node
        self._what = what
        self._lost = lost
        self._ended_here = False
        self._wake = threading.Event()  # either stream has something, or its end
        self.channel.in_buffer.set_event(self._wake)
        self.channel.in_stderr_buffer.set_event(self._wake)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError, EOFError):
            # sendall copies all that is left for every packet: small pieces keep that linear
            for start in range(0, len(data), PIECE):
                self.channel.sendall(data[start : start + PIECE])

    def end_input(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self.channel.shutdown_write()

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        ended = self.channel.eof_received or self.channel.closed  # asked first: what the buffers hold came before it
        if not (self.channel.recv_ready() or self.channel.recv_stderr_ready()):
            if ended:
                if not self._ended_here:
                    self.exit_code()
                return None
            self._wake.wait(timeout)
        out = self.channel.recv(PIECE) if self.channel.recv_ready() else b""
        err = self.channel.recv_stderr(PIECE) if self.channel.recv_stderr_ready() else b""
        return out, err

    def exit_code(self) -> int:
        """-1 where a signal ended it. Raises NodeUnreachable when the connection was lost: the code is not known."""
        if not self.channel.status_event.wait(_EXIT_TIMEOUT):
            raise NodeUnreachable(self._node, f"`{self._what}` ended without an exit status", "look at the node's sshd")
        if self.channel.exit_status == -1 and has_ended(self.channel.get_transport()):
            raise self._lost(EOFError(f"while `{self._what}` ran"))
        return self.channel.exit_status

    def end(self) -> None:
        self._ended_here = True
        self.close()

    def close(self) -> None:
        with self._lock:
            release, self._release = self._release, None
        if release:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # it is gone with its connection
                self.channel.close()
            release()
