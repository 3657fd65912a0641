"""A machine over ssh: commands on a limited number of channels, connections to other addresses."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import paramiko

from launcher.errors import LauncherError, NodeUnreachable
from launcher.model.forward import Forward
from launcher.model.limits import DEFAULT_LIMITS, AnswerLimits
from launcher.node.forwarding import forwarded
from launcher.node.machine import OPEN_TIMEOUT, PIECE, LocalMachine, Machine, abbreviate
from launcher.node.ssh.config import CLIENT_FAILED, open_ssh_argv, quote, typed
from launcher.node.ssh.connection import CHANNELS, Connection, SshPool
from launcher.node.ssh.handshake import has_ended, has_key, open_tunnel

_EXIT_TIMEOUT = 10.0  # seconds: the exit status follows the end of the output
_FULL_TIMEOUT = 1.0  # seconds that sshd may take to release sessions that have ended
_FULL_PAUSE = 0.05
_PROHIBITED = 1  # SSH_OPEN_ADMINISTRATIVELY_PROHIBITED, RFC 4254 5.1


@dataclass(frozen=True)
class Opened:
    """A channel on which the command was started."""

    channel: paramiko.Channel


@dataclass(frozen=True)
class Busy:
    """sshd refused another session on this connection, which it still serves."""

    error: Exception


@dataclass(frozen=True)
class Lost:
    """The request failed. ended: because the connection is lost, so that nothing was started."""

    error: Exception
    ended: bool


def _request(transport: paramiko.Transport, command: str, timeout: float) -> Opened | Busy | Lost:
    """Try once to start a command on a new channel, within `timeout` seconds for each step."""
    asked = time.monotonic()
    try:
        channel = transport.open_channel("session", timeout=timeout)
    except (paramiko.SSHException, EOFError, OSError) as error:
        # not always a ChannelException: paramiko keeps one for all channels refused at the same time
        refused = isinstance(error, paramiko.SSHException) and time.monotonic() - asked < timeout
        return Busy(error) if refused and transport.is_active() else Lost(error, has_ended(transport))
    try:
        channel.settimeout(timeout)
        channel.exec_command(command)
    except (paramiko.SSHException, EOFError, OSError) as error:
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):  # the connection may be lost
            channel.close()
        return Lost(error, has_ended(transport))
    return Opened(channel)


class SshStream:
    """Implements CommandStream on a channel, which counts against the connection's limit until it is closed."""

    def __init__(self, machine: SshMachine, channel: paramiko.Channel, what: str, release: Callable[[], None]) -> None:
        """what: the start of the command, for messages."""
        self.channel = channel
        self._machine = machine
        self._what = what
        self._release: Callable[[], None] | None = release
        self._lock = threading.Lock()
        self._ended_here = False
        self._wake = threading.Event()  # either stream has data or has ended
        self.channel.in_buffer.set_event(self._wake)
        self.channel.in_stderr_buffer.set_event(self._wake)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError, EOFError):
            # sendall copies the rest of the data for every packet: small pieces keep the cost linear
            for start in range(0, len(data), PIECE):
                self.channel.sendall(data[start : start + PIECE])

    def end_input(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self.channel.shutdown_write()

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        ended = self.channel.eof_received or self.channel.closed  # checked first: buffered data arrived before the end
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
        """-1 if a signal killed the command. Raises NodeUnreachable if the connection was lost."""
        if not self.channel.status_event.wait(_EXIT_TIMEOUT):
            what = f"`{self._what}` exited without an exit status"
            raise NodeUnreachable(self._machine.node, what, "check the log of the node's sshd")
        if self.channel.exit_status == -1 and has_ended(self.channel.get_transport()):
            raise self._machine.lost(EOFError(f"while running `{self._what}`"))
        return self.channel.exit_status

    def end(self) -> None:
        self._ended_here = True
        self.close()

    def close(self) -> None:
        with self._lock:
            release, self._release = self._release, None
        if release:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # the connection is closed already
                self.channel.close()
            release()


class SshMachine(Machine):
    """Connects on first use. Errors name the node. Thread-safe.

    All methods that connect raise NodeUnreachable, HostKeyUnknown, HostKeyChanged, AuthFailed.
    """

    def __init__(self, node: str, host: str, pool: SshPool, limits: AnswerLimits = DEFAULT_LIMITS) -> None:
        """Raises UsageError for a host that OpenSSH rejects."""
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
        """Start `command`, text for the node's shell. Raises NodeUnreachable."""
        return self._start(command, command)

    def start(self, argv: Sequence[str], *, stdin: bool, timeout: float) -> SshStream:
        """Start a command; its arguments are quoted for the node's shell. Raises NodeUnreachable.

        Without stdin, no end of input is sent: it could cross the end of a short command, which some servers reject.
        """
        text = quote(argv) if stdin else f"{quote(argv)} </dev/null"
        stream = self._start(text, abbreviate(argv), min(timeout, OPEN_TIMEOUT))
        stream.channel.settimeout(timeout)
        return stream

    def interact(
        self, argv: Sequence[str], *, terminal: bool, interrupt: Callable[[], None], ports: Sequence[Forward] = ()
    ) -> int:
        """Run a command with the OpenSSH client, which attaches terminals. Raises NodeUnreachable, also if the
        connection is lost while it runs; NodeUnfit if this machine has no OpenSSH client; UsageError for a port in use.

        ports: forwarded by this process, as the client's -L would also open each LocalForward of the user's ssh config.
        """
        ssh = open_ssh_argv(self.host, self.ssh_config, argv, *(["-t"] if terminal else []))
        with contextlib.ExitStack() as forwarding:
            for port in ports:
                self._require_forwarding(port.remote)
                forwarding.enter_context(forwarded(self, port.remote, port.local))
            code = LocalMachine(self.node, self.user).interact(ssh, terminal=terminal, interrupt=interrupt)
        if code == CLIENT_FAILED:
            self.run(["true"])  # if the node still responds, it is the command's own exit code
        return code

    def has_host_key(self, address: str, port: int, host_key: str, timeout: float) -> bool | None:
        """Through the node's sshd; None if that has AllowTcpForwarding no. Raises NodeUnreachable."""
        transport = self._transport()
        try:
            channel = open_tunnel(transport, address, port, timeout)
        except (paramiko.ChannelException, TimeoutError):
            return None
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise self.lost(error) from error
        with contextlib.closing(channel):
            return has_key(channel, host_key, timeout)

    def tunnel(self, port: int) -> paramiko.Channel:
        """Through the node's sshd, which may not allow it (AllowTcpForwarding no)."""
        try:
            return open_tunnel(self._transport(), "127.0.0.1", port, OPEN_TIMEOUT)
        except (paramiko.SSHException, TimeoutError, EOFError, OSError) as error:
            raise self._not_forwarded(port, error) from error

    def _require_forwarding(self, port: int) -> None:
        """Raises NodeUnreachable if its sshd forwards no connections; nothing needs to listen on the port yet."""
        try:
            open_tunnel(self._transport(), "127.0.0.1", port, OPEN_TIMEOUT).close()
        except paramiko.ChannelException as error:
            if error.code == _PROHIBITED:
                raise self._not_forwarded(port, error) from error
        except (paramiko.SSHException, TimeoutError, EOFError, OSError) as error:
            raise self.lost(error) from error

    def _not_forwarded(self, port: int, error: Exception) -> NodeUnreachable:
        what = f"its sshd did not connect to port {port}: {error}"
        return NodeUnreachable(self.node, what, "set AllowTcpForwarding yes in its sshd_config")

    def host_key(self) -> str:
        """Return the node's verified host key, base64 as in known_hosts."""
        return base64.b64encode(self._transport().get_remote_server_key().asbytes()).decode()

    def most_sessions(self) -> int | None:
        """Counted on a separate connection. Raises NodeUnreachable."""
        transport = self._transport(self._connection.next())
        channels: list[paramiko.Channel] = []
        with contextlib.suppress(paramiko.SSHException):
            while len(channels) < CHANNELS:
                channels.append(transport.open_channel("session", timeout=OPEN_TIMEOUT))
        for channel in channels:
            channel.close()
        return len(channels) if len(channels) < CHANNELS else None

    def _start(self, command: str, what: str, timeout: float = OPEN_TIMEOUT) -> SshStream:
        """Start a command on a new channel, within the limit. what: the start of the command, for messages."""
        if not self._connection.sessions.acquire(timeout=timeout):
            what = f"all {CHANNELS} channels of its ssh connection were in use for {timeout:g} s"
            raise NodeUnreachable(self.node, what, "run fewer commands at the same time")
        release = self._connection.sessions.release
        try:
            return SshStream(self, self._channel(command, timeout), what, release)
        except BaseException:
            release()
            raise

    def _channel(self, command: str, timeout: float) -> paramiko.Channel:
        """A connection that proves to be lost is replaced, once: nothing was started on the node.

        sshd counts a session until it has reaped its process, slightly longer than we do: then the request is repeated.
        If it allows fewer sessions than we use, the rest use further connections.
        """
        connection, replaced, began = self._connection, False, time.monotonic()
        while True:
            match _request(self._transport(connection), command, timeout):
                case Opened(channel=channel):
                    return channel
                case Lost(error=error, ended=ended):
                    if replaced or not ended:
                        raise self.lost(error) from error
                    replaced = True
                case Busy(error=error):
                    connection.full = connection.full or time.monotonic() - began > _FULL_TIMEOUT
                    if connection.full and connection.index < CHANNELS - 1:
                        connection, began = connection.next(), time.monotonic()
                    elif connection.full or connection.closed.wait(_FULL_PAUSE):
                        what = f"its sshd refuses sessions: {getattr(error, 'text', '') or error}"
                        fix = f"set MaxSessions to {CHANNELS + 2} in its sshd_config"
                        raise NodeUnreachable(self.node, what, fix) from error

    def typed(self, command: str) -> str:
        return typed(self.host, self.ssh_config, command)

    def lost(self, error: Exception) -> NodeUnreachable:
        """Return the error for a connection that was lost during a call."""
        what = f"the ssh connection to {self.host} was lost ({str(error) or type(error).__name__})"
        return NodeUnreachable(self.node, what, f"check that the node is up: {self.typed('true')}")

    def _transport(self, connection: Connection | None = None) -> paramiko.Transport:
        try:
            return (connection or self._connection).transport()
        except LauncherError as error:
            where = self.node if error.where in (self.node, self.host) else f"{self.node} (through {error.where})"
            raise type(error)(where, error.what, error.next_step) from error
