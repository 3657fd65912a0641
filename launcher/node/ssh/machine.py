"""A node behind ssh: commands on channels out of its budget, connections to other addresses."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Callable, Sequence

import paramiko

from launcher.errors import LauncherError, NodeUnreachable
from launcher.model.forward import Forward
from launcher.model.limits import DEFAULT_LIMITS, AnswerLimits
from launcher.node.machine import OPEN_TIMEOUT, PIECE, LocalMachine, Machine, first_words
from launcher.node.ssh.config import CLIENT_FAILED, open_ssh_argv, quote
from launcher.node.ssh.connection import CHANNELS, Connection, SshPool
from launcher.node.ssh.handshake import has_ended, open_tunnel, proves

_EXIT_TIMEOUT = 10.0  # seconds: the exit status comes right behind the end of the output
_FULL_TIMEOUT = 1.0  # seconds that sshd may take to forget sessions that have ended
_FULL_PAUSE = 0.05
# A connection of its own: one that the user's ssh shares would keep the port after the command. ssh ends where it
# cannot listen here, and says so for each client that it cannot connect there.
_FORWARDING = ("-S", "none", *("-o", "ClearAllForwardings=no", "-o", "ExitOnForwardFailure=yes", "-o", "LogLevel=INFO"))


class SshStream:
    """Implements CommandStream, on a channel that counts against the connection's budget until it is closed."""

    def __init__(self, machine: SshMachine, channel: paramiko.Channel, what: str, release: Callable[[], None]) -> None:
        """what: the command's first words."""
        self.channel = channel
        self._machine = machine
        self._what = what
        self._release: Callable[[], None] | None = release
        self._lock = threading.Lock()
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
            what = f"`{self._what}` ended without an exit status"
            raise NodeUnreachable(self._machine.node, what, "look at the node's sshd")
        if self.channel.exit_status == -1 and has_ended(self.channel.get_transport()):
            raise self._machine.lost(EOFError(f"while `{self._what}` ran"))
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


class SshMachine(Machine):
    """Connects when first used. Errors name the node. Safe for use from several threads.

    Everything that has to connect raises NodeUnreachable, HostKeyUnknown, HostKeyChanged, AuthFailed.
    """

    def __init__(self, node: str, host: str, pool: SshPool, limits: AnswerLimits = DEFAULT_LIMITS) -> None:
        """Raises UsageError for a host that OpenSSH refuses."""
        self.node = node
        self.limits = limits
        self.host = host
        self.ssh_config = pool.ssh_config
        self._connection: Connection = pool.connection(host)
        self.user = self._connection.target.user

    def connect(self) -> None:
        """Connect now instead of with the first command."""
        self._transport()

    def command(self, command: str) -> SshStream:
        """What runs `command`, text for the node's shell. Raises NodeUnreachable."""
        return self._start(command, command)

    def start(self, argv: Sequence[str], *, stdin: bool, timeout: float) -> SshStream:
        """Quoted for the node's shell word by word. Raises NodeUnreachable.

        Without stdin no end of it is sent: that could cross the end of a short command, which some servers refuse.
        """
        text = quote(argv) if stdin else f"{quote(argv)} </dev/null"
        stream = self._start(text, first_words(argv), min(timeout, OPEN_TIMEOUT))
        stream.channel.settimeout(timeout)
        return stream

    def interact(
        self, argv: Sequence[str], *, terminal: bool, interrupt: Callable[[], None], ports: Sequence[Forward] = ()
    ) -> int:
        """By the OpenSSH client, which joins terminals. Raises NodeUnreachable, also when the connection is lost
        meanwhile; NodeUnfit where this machine has no such client.
        """
        options = [*(["-t"] if terminal else []), *(_FORWARDING if ports else ())]
        options += [word for port in ports for word in ("-L", port.option)]
        ssh = open_ssh_argv(self.host, self.ssh_config, argv, *options)
        code = LocalMachine(self.node, self.user).interact(ssh, terminal=terminal, interrupt=interrupt)
        if code == CLIENT_FAILED:
            self.run(["true"])  # does the node still answer? then it is the command's own code
        return code

    def has_host_key(self, address: str, port: int, host_key: str, timeout: float) -> bool | None:
        """Through the node's sshd; None with AllowTcpForwarding no there. Raises NodeUnreachable."""
        transport = self._transport()
        try:
            channel = open_tunnel(transport, address, port, timeout)
        except (paramiko.ChannelException, TimeoutError):
            return None
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self.lost(error) from error
        with contextlib.closing(channel):
            return proves(channel, host_key, timeout)

    def tunnel(self, port: int) -> paramiko.Channel:
        """Through the node's sshd, which may allow none (AllowTcpForwarding no)."""
        try:
            return open_tunnel(self._transport(), "127.0.0.1", port, OPEN_TIMEOUT)
        except (paramiko.SSHException, TimeoutError, EOFError, OSError) as error:
            what = f"its sshd makes no connection to its port {port}: {error}"
            raise NodeUnreachable(self.node, what, "set AllowTcpForwarding yes in its sshd_config") from error

    def host_key(self) -> str:
        """The key that the node has proven, base64 as in known_hosts."""
        return base64.b64encode(self._transport().get_remote_server_key().asbytes()).decode()

    def most_sessions(self) -> int | None:
        """Tried on a connection of its own. Raises NodeUnreachable."""
        transport = self._transport(self._connection.next())
        channels: list[paramiko.Channel] = []
        with contextlib.suppress(paramiko.SSHException):
            while len(channels) < CHANNELS:
                channels.append(transport.open_channel("session", timeout=OPEN_TIMEOUT))
        for channel in channels:
            channel.close()
        return len(channels) if len(channels) < CHANNELS else None

    def _start(self, command: str, what: str, timeout: float = OPEN_TIMEOUT) -> SshStream:
        """A channel of its own for a command, within the budget. what: its first words."""
        if not self._connection.sessions.acquire(timeout=timeout):
            what = f"all {CHANNELS} channels of its ssh connection were in use for {timeout:g} s"
            raise NodeUnreachable(self.node, what, "fewer commands at once")
        release = self._connection.sessions.release
        try:
            return SshStream(self, self._channel(command, timeout), what, release)
        except BaseException:
            release()
            raise

    def _channel(self, command: str, timeout: float) -> paramiko.Channel:
        """A connection that turns out to be dead is replaced, once: nothing was begun on the node.

        sshd counts a session until it has reaped its process, a moment longer than we do: then it is asked again. If it
        gives fewer of them than we use, the rest go over further connections.
        """
        connection, replaced, began = self._connection, False, time.monotonic()
        while True:
            transport, asked = self._transport(connection), time.monotonic()
            channel: paramiko.Channel | None = None
            try:
                channel = transport.open_channel("session", timeout=timeout)
                channel.settimeout(timeout)
                channel.exec_command(command)
            except (paramiko.SSHException, EOFError, OSError) as error:
                # not always a ChannelException: paramiko keeps one for all that are refused at once
                refused = channel is None and isinstance(error, paramiko.SSHException)
                if refused and transport.is_active() and time.monotonic() - asked < timeout:
                    full = connection.full = connection.full or time.monotonic() - began > _FULL_TIMEOUT
                    if full and connection.place < CHANNELS - 1:
                        connection, began = connection.next(), time.monotonic()
                    elif full or connection.closed.wait(_FULL_PAUSE):
                        what = f"its sshd gives no channel: {getattr(error, 'text', '') or error}"
                        raise NodeUnreachable(self.node, what, f"set MaxSessions to {CHANNELS + 2} there") from error
                    continue
                if channel:
                    with contextlib.suppress(paramiko.SSHException, EOFError, OSError):  # it may be what was lost
                        channel.close()
                if replaced or not has_ended(transport):
                    raise self.lost(error) from error
                replaced = True
            else:
                return channel

    def lost(self, error: Exception) -> NodeUnreachable:
        """The error for a connection that broke under a call."""
        what = f"the ssh connection to {self.host} was lost ({str(error) or type(error).__name__})"
        return NodeUnreachable(self.node, what, f"is the node still up? try it: ssh {self.host} true")

    def _transport(self, connection: Connection | None = None) -> paramiko.Transport:
        try:
            return (connection or self._connection).transport()
        except LauncherError as error:
            where = self.node if error.where in (self.node, self.host) else f"{self.node} (through {error.where})"
            raise type(error)(where, error.what, error.next_step) from error
