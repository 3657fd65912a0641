"""The ssh-agent at a given socket, the one place where protected methods of paramiko are used.

paramiko's public Agent knows $SSH_AUTH_SOCK only, so no IdentityAgent of an ssh config, and waits for ever for an agent
that does not answer. Its base class does the rest; `_connect` and `_close` are what its subclasses are made of.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from paramiko.agent import AgentSSH


class SocketAgent(AgentSSH):
    """Its get_keys() are keys that sign by asking the agent."""

    if TYPE_CHECKING:  # paramiko's stubs leave out protected methods

        def _connect(self, conn: socket.socket) -> None: ...
        def _close(self) -> None: ...

    def __init__(self, path: str, timeout: float) -> None:
        """timeout: seconds for every answer. Raises OSError, paramiko.SSHException when no agent answers there."""
        super().__init__()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout)
            connection.connect(path)
            self._connect(connection)
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        self._close()
