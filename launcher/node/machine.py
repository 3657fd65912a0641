"""Where an engine's node is: this machine, or one behind ssh. What both can do, written once above them."""

from __future__ import annotations

import base64
import contextlib
import errno
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import paramiko

from launcher.errors import NodeUnfit
from launcher.model.facts import Reach
from launcher.node import terminal as terminals
from launcher.node.ssh import hostkeys
from launcher.node.ssh.node import Ssh
from launcher.node.ssh.session import Done
from launcher.node.ssh.stream import SshStream
from launcher.node.ssh.transport import Stream, Wire, dial, handshake
from launcher.node.streams import CommandStream, LocalStream

_REFUSED = 2  # SSH_OPEN_CONNECT_FAILED, RFC 4254 5.1
_SILENT_WORDS = ("timed out", "no route", "unreachable", "host is down")


class Machine(Protocol):
    """Commands on a node, connections from it."""

    @property
    def node(self) -> str: ...

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Done: ...

    def open(self, argv: Sequence[str]) -> CommandStream:
        """Start a command whose output is read as it comes."""

    def interact(self, argv: Sequence[str], *, terminal: bool, interrupt: Callable[[], None]) -> int:
        """Run a command joined to the caller's terminal or pipes (see launcher.node.terminal); its exit code."""

    def leash(self, argv: Sequence[str]) -> AbstractContextManager[Callable[[str], None]]:
        """A command whose stdin ends when the caller does, however that ends (see launcher.node.terminal)."""

    def reach(self, address: str, port: int, timeout: float, expect: str | None = None) -> Reach: ...

    def host_key(self) -> str | None: ...

    def ssh_port(self) -> int | None: ...

    @property
    def user(self) -> str: ...


def run_script(machine: Machine, script: str, *arguments: str, timeout: float = 60.0) -> Done:
    """Of POSIX sh, with its $1, $2, ... Raises what Machine.run raises."""
    return machine.run(["sh", "-c", script, "launcher", *arguments], timeout=timeout)


class LocalMachine:
    """This machine."""

    def __init__(self, node: str, user: str) -> None:
        self.node = node
        self.user = user

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float = 60.0) -> Done:
        """Raises NodeUnfit when it cannot be started or does not end in time."""
        started = time.time()
        try:
            done = subprocess.run(argv, input=stdin, capture_output=True, timeout=timeout, check=False)
        except FileNotFoundError as error:
            raise NodeUnfit(self.node, f"there is no {argv[0]}", "install it") from error
        except subprocess.TimeoutExpired as error:
            raise NodeUnfit(self.node, f"`{argv[0]}` took over {timeout:g} s", "is this machine overloaded?") from error
        return Done(done.returncode, done.stdout, done.stderr, started, time.time())

    def open(self, argv: Sequence[str]) -> CommandStream:
        """Raises OSError when it cannot be started."""
        return LocalStream(argv)

    def interact(self, argv: Sequence[str], *, terminal: bool, interrupt: Callable[[], None]) -> int:
        """Raises NodeUnfit when it cannot be started."""
        try:
            return terminals.here(argv, terminal=terminal, interrupt=interrupt)
        except FileNotFoundError as error:
            raise NodeUnfit(self.node, f"there is no {argv[0]}", "install it") from error

    def leash(self, argv: Sequence[str]) -> AbstractContextManager[Callable[[str], None]]:
        return terminals.leash_here(argv)

    def reach(self, address: str, port: int, timeout: float, expect: str | None = None) -> Reach:
        try:
            connection = dial(address, port, time.monotonic() + timeout)
        except ConnectionRefusedError:
            return Reach.REFUSED
        except PermissionError:
            return Reach.UNKNOWN
        except OSError as error:
            return Reach.UNKNOWN if error.errno in (errno.EINVAL, errno.EAFNOSUPPORT) else Reach.SILENT
        with contextlib.closing(connection):
            return Reach.OPEN if expect is None or proves(connection, expect, timeout) else Reach.OTHER

    def host_key(self) -> None:
        return None

    def ssh_port(self) -> None:
        return None


class SshMachine:
    """A node behind ssh."""

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
        return terminals.over_ssh(self._ssh, argv, terminal=terminal, interrupt=interrupt)

    def leash(self, argv: Sequence[str]) -> AbstractContextManager[Callable[[str], None]]:
        """Raises NodeUnreachable."""
        return terminals.leash_over_ssh(self._ssh, argv)

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
    if code == _REFUSED and "refused" in words:
        return Reach.REFUSED
    return Reach.UNKNOWN


def proves(stream: Stream | socket.socket, expect: str, timeout: float) -> bool:
    """Whether an ssh server behind this stream holds the private half of that host key: a key exchange proves it."""
    blob = base64.b64decode(expect)
    key_type = hostkeys.type_of(blob)
    try:
        transport = handshake(Wire(stream), hostkeys.signatures(key_type), time.monotonic() + timeout)
    except (paramiko.SSHException, EOFError, OSError):
        return False  # no ssh server, or one without such a key
    try:
        return transport.get_remote_server_key().asbytes() == blob
    finally:
        transport.close()
