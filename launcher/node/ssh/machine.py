"""A node behind ssh: commands, channels out of its budget, connections to other addresses."""

from __future__ import annotations

import base64
import contextlib
import queue
import shlex
import time
from collections.abc import Callable, Sequence

import paramiko

from launcher.errors import LauncherError, NodeUnreachable
from launcher.model.facts import Reach
from launcher.model.limits import DEFAULT_LIMITS, AnswerLimits
from launcher.node.machine import Done, LocalMachine, Machine, run_to_end
from launcher.node.ssh.config import open_ssh_argv
from launcher.node.ssh.connection import CHANNELS, Connection, SshPool
from launcher.node.ssh.handshake import CONNECT_FAILED, has_ended, proves
from launcher.node.ssh.quoting import quote
from launcher.node.ssh.stream import SshStream

_OPEN_TIMEOUT = 30.0
_FULL_TIMEOUT = 1.0  # seconds that sshd may take to forget sessions that have ended
_FULL_PAUSE = 0.05
CLIENT_FAILED = 255  # the OpenSSH client's own exit code: no connection, or none any more
_SILENT_WORDS = ("timed out", "no route", "unreachable", "host is down")


class _Died(Exception):  # noqa: N818 - inside this module only
    """The connection was dead when it was used; nothing was begun on the node."""


class _Full(Exception):  # noqa: N818 - inside this module only
    """sshd refused one more session."""


class SshMachine(Machine):
    """Connects when first used. Errors name the node. Safe for use from several threads."""

    def __init__(self, node: str, host: str, pool: SshPool, limits: AnswerLimits = DEFAULT_LIMITS) -> None:
        """Raises UsageError for a host that OpenSSH refuses."""
        self.node = node
        self.limits = limits
        self.host = host
        self.ssh_config = pool.ssh_config
        self._connection: Connection = pool.connection(host)
        self.user = self._connection.target.user
        self._ahead: queue.SimpleQueue[tuple[str, SshStream]] = queue.SimpleQueue()

    def begin(self, command: str) -> None:
        """Start a command ahead of the caller that will ask `command` for it.

        Raises NodeUnreachable, HostKeyUnknown, HostKeyChanged, AuthFailed, as everything here that has to connect.
        """
        self._ahead.put((command, self._start(command, command)))

    def command(self, command: str) -> SshStream:
        """What runs `command`, text for the node's shell. Raises NodeUnreachable."""
        with contextlib.suppress(queue.Empty):
            begun, stream = self._ahead.get_nowait()
            if begun == command and stream.channel.get_transport().is_active():
                return stream
            stream.close()
        return self._start(command, command)

    def open(self, argv: Sequence[str], timeout: float = _OPEN_TIMEOUT, *, stdin: bool = True) -> SshStream:
        """Quoted for the node's shell word by word. Raises NodeUnreachable.

        stdin: it has one. Without, no end of it is sent: that could cross the end of a short command, which some
        servers refuse.
        """
        return self._start(quote(argv) if stdin else f"{quote(argv)} </dev/null", shlex.join(argv[:3])[:60], timeout)

    def run(self, argv: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Done:
        """Raises NodeUnreachable also for a connection lost while it ran: whether it ran to its end is not known."""
        timeout = timeout or self.limits.seconds
        deadline = time.monotonic() + timeout
        stream = self.open(argv, min(timeout, _OPEN_TIMEOUT), stdin=bool(stdin))
        stream.channel.settimeout(max(0.1, deadline - time.monotonic()))
        return run_to_end(self, stream, argv, stdin, deadline)

    def interact(self, argv: Sequence[str], *, terminal: bool, interrupt: Callable[[], None]) -> int:
        """By the OpenSSH client, which joins terminals. Raises NodeUnreachable, also when the connection is lost
        meanwhile; NodeUnfit where this machine has no such client.
        """
        ssh = open_ssh_argv(self.host, self.ssh_config, argv, *(["-t"] if terminal else []))
        code = LocalMachine(self.node, self.user).interact(ssh, terminal=terminal, interrupt=interrupt)
        if code == CLIENT_FAILED:
            self.run(["true"])  # does the node still answer? then it is the command's own code
        return code

    def reach(self, address: str, port: int, timeout: float, expect: str | None = None) -> Reach:
        """Through the node's sshd, which needs AllowTcpForwarding there: UNKNOWN without. Raises NodeUnreachable."""
        transport = self._transport()
        try:
            channel = self._connection.tunnel(transport, address, port, timeout)
        except paramiko.ChannelException as error:
            return refusal(error.code, error.text)
        except TimeoutError:
            return Reach.SILENT
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self._lost(error) from error
        with contextlib.closing(channel):
            return Reach.OPEN if expect is None or proves(channel, expect, timeout) else Reach.OTHER

    def host_key(self) -> str:
        """The key that the node has proven, base64 as in known_hosts."""
        return base64.b64encode(self._transport().get_remote_server_key().asbytes()).decode()

    def most_sessions(self) -> int | None:
        """Tried on a connection of its own. Raises NodeUnreachable."""
        transport = self._transport(self._connection.next())
        channels: list[paramiko.Channel] = []
        with contextlib.suppress(paramiko.SSHException):
            while len(channels) < CHANNELS:
                channels.append(transport.open_channel("session", timeout=_OPEN_TIMEOUT))
        for channel in channels:
            channel.close()
        return len(channels) if len(channels) < CHANNELS else None

    def _start(self, command: str, what: str, timeout: float = _OPEN_TIMEOUT) -> SshStream:
        """A channel of its own for a command, within the budget. what: its first words."""
        if not self._connection.sessions.acquire(timeout=timeout):
            raise NodeUnreachable(
                self.node,
                f"all {CHANNELS} channels of its ssh connection were in use for {timeout:g} s",
                "fewer commands at once",
            )
        release = self._connection.sessions.release
        try:
            return SshStream(self._channel(command, timeout), release, self.node, what, self._lost)
        except BaseException:
            release()
            raise

    def _channel(self, command: str, timeout: float) -> paramiko.Channel:
        """A connection that turns out to be dead is replaced, once.

        sshd counts a session until it has reaped its process, a moment longer than we do: then it is asked again. If it
        gives fewer of them than we use, the rest go over further connections.
        """
        connection, replaced, began = self._connection, False, time.monotonic()
        while True:
            try:
                return self._try_channel(connection, command, timeout)
            except _Died as error:
                if replaced:
                    raise self._lost(error) from error
                replaced = True
            except _Full as error:
                connection.full = connection.full or time.monotonic() - began > _FULL_TIMEOUT
                if connection.full and connection.place < CHANNELS - 1:
                    connection, began = connection.next(), time.monotonic()
                elif connection.closed.wait(_FULL_PAUSE) or connection.full:
                    raise NodeUnreachable(
                        self.node, f"its sshd gives no channel: {error}", f"set MaxSessions to {CHANNELS + 2} there"
                    ) from error

    def _try_channel(self, connection: Connection, command: str, timeout: float) -> paramiko.Channel:
        transport = self._transport(connection)
        began = time.monotonic()
        try:
            try:
                channel = connection.open_session(transport, timeout)
            except paramiko.SSHException as error:
                # not always a ChannelException: paramiko keeps one for all that are refused at once
                if transport.is_active() and time.monotonic() - began < timeout:
                    raise _Full(getattr(error, "text", "") or str(error)) from error
                raise
            try:
                channel.settimeout(timeout)
                channel.exec_command(command)
            except BaseException:
                channel.close()
                raise
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not has_ended(transport):
                raise self._lost(error) from error
            raise _Died(str(error) or type(error).__name__) from error
        return channel

    def _lost(self, error: Exception) -> NodeUnreachable:
        """The error for a connection that broke under a call."""
        return NodeUnreachable(
            self.node,
            f"the ssh connection to {self.host} was lost ({str(error) or type(error).__name__})",
            f"is the node still up? try it: ssh {self.host} true",
        )

    def _transport(self, connection: Connection | None = None) -> paramiko.Transport:
        try:
            return (connection or self._connection).transport()
        except LauncherError as error:
            where = self.node if error.where in (self.node, self.host) else f"{self.node} (through {error.where})"
            raise type(error)(where, error.what, error.next_step) from error


def refusal(code: int, text: str) -> Reach:
    """What sshd's reason for not opening a connection means."""
    words = text.lower()
    if any(silent in words for silent in _SILENT_WORDS):
        return Reach.SILENT
    if code == CONNECT_FAILED and "refused" in words:
        return Reach.REFUSED
    return Reach.UNKNOWN
