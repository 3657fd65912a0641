"""A node behind ssh as a Machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import paramiko

from launcher.model.facts import Reach
from launcher.node.machine import Done
from launcher.node.ssh import interactive
from launcher.node.ssh.commands import Ssh
from launcher.node.ssh.handshake import CONNECT_FAILED, proves
from launcher.node.ssh.stream import SshStream
from launcher.node.streams import CommandStream

_SILENT_WORDS = ("timed out", "no route", "unreachable", "host is down")


class SshMachine:
    """Implements Machine."""

    def __init__(self, ssh: Ssh) -> None:
        self._ssh = ssh
        self._port: int | None = None

    @property
    def node(self) -> str:
        return self._ssh.node

    @property
    def user(self) -> str:
        return self._ssh.user

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Done:
        """Raises NodeUnreachable."""
        return self._ssh.run(argv, stdin, timeout)

    def open(self, argv: Sequence[str]) -> CommandStream:
        """Raises NodeUnreachable."""
        return SshStream(self._ssh, argv)

    def interact(self, argv: Sequence[str], *, terminal: bool, interrupt: Callable[[], None]) -> int:
        """Raises NodeUnreachable."""
        return interactive.run(self._ssh, argv, terminal=terminal, interrupt=interrupt)

    def kill_on_disconnect(self, argv: Sequence[str]) -> AbstractContextManager[Callable[[str], None]]:
        """Raises NodeUnreachable."""
        return interactive.kill_on_disconnect(self._ssh, argv)

    def reach(self, address: str, port: int, timeout: float, expect: str | None = None) -> Reach:
        """Through the node's sshd, which needs AllowTcpForwarding there: UNKNOWN without. Raises NodeUnreachable."""
        try:
            channel = self._ssh.dial(address, port, timeout)
        except paramiko.ChannelException as error:
            return refusal(error.code, error.text)
        except TimeoutError:
            return Reach.SILENT
        with contextlib.closing(channel):
            return Reach.OPEN if expect is None or proves(channel, expect, timeout) else Reach.OTHER

    def host_key(self) -> str:
        return self._ssh.host_key()

    def ssh_port(self) -> int:
        """As the node itself sees it: a forwarded port in the ssh config is not the one that its neighbours reach."""
        if self._port is None:
            words = self.run(["sh", "-c", "echo $SSH_CONNECTION"]).out.split()
            self._port = int(words[3]) if len(words) == 4 and words[3].isdigit() else self._ssh.port
        return self._port


def refusal(code: int, text: str) -> Reach:
    """What sshd's reason for not opening a connection means."""
    words = text.lower()
    if any(silent in words for silent in _SILENT_WORDS):
        return Reach.SILENT
    if code == CONNECT_FAILED and "refused" in words:
        return Reach.REFUSED
    return Reach.UNKNOWN
