"""One node over ssh: commands, channels out of its budget, connections to other addresses."""

from __future__ import annotations

import base64
import contextlib
import queue
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import paramiko

from launcher.errors import LauncherError, NodeUnreachable
from launcher.node.machine import Done
from launcher.node.ssh.connection import CHANNELS, Connection, SshPool
from launcher.node.ssh.handshake import has_ended

T = TypeVar("T")
_PIECE = 1 << 16
_SMALL = 1 << 15  # bytes of stdin that surely fit into the server's window: no thread is needed for them
_OPEN_TIMEOUT = 30.0
_FULL_TIMEOUT = 10.0
_EXIT_TIMEOUT = 10.0  # the exit status comes right behind the end of the output


class _Died(Exception):  # noqa: N818 - inside this module only
    """The connection was dead when it was used; nothing was begun on the node."""


class _Full(Exception):  # noqa: N818 - inside this module only
    """sshd refused one more session."""


class Session:
    """A channel that counts against the connection's budget until it is closed."""

    def __init__(self, channel: paramiko.Channel, release: Callable[[], None]) -> None:
        self.channel = channel
        self._release: Callable[[], None] | None = release
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            release, self._release = self._release, None
        if release:
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # it is gone with its connection
                self.channel.close()
            release()


class Ssh:
    """A node reached over ssh. Errors name the node. Safe for use from several threads."""

    def __init__(self, node: str, host: str, pool: SshPool) -> None:
        """Raises UsageError for a host that OpenSSH refuses. Connects when first used."""
        self.node = node
        self.host = host
        self.ssh_config = pool.ssh_config
        self._connection: Connection = pool.connection(host)
        self._ahead: queue.SimpleQueue[tuple[str, Session]] = queue.SimpleQueue()

    @property
    def user(self) -> str:
        return self._connection.target.user

    @property
    def port(self) -> int:
        return self._connection.target.port

    def connect(self) -> None:
        """Raises NodeUnreachable, HostKeyUnknown, HostKeyChanged, AuthFailed."""
        self._transport()

    def begin(self, command: str) -> None:
        """Start a command ahead of the caller that will ask `command` for it. Raises what connect() raises."""
        session, _ = self.session(lambda channel: channel.exec_command(command))
        self._ahead.put((command, session))

    def command(self, command: str) -> Session:
        """A channel that runs `command`, text for the node's shell. Raises NodeUnreachable."""
        with contextlib.suppress(queue.Empty):
            begun, session = self._ahead.get_nowait()
            if begun == command and session.channel.get_transport().is_active():
                return session
            session.close()
        return self.session(lambda channel: channel.exec_command(command))[0]

    def host_key(self) -> str:
        """The key that the node has proven, base64 as in known_hosts."""
        return base64.b64encode(self._transport().get_remote_server_key().asbytes()).decode()

    def session(self, start: Callable[[paramiko.Channel], T], timeout: float = _OPEN_TIMEOUT) -> tuple[Session, T]:
        """A channel on which `start` was called to begin something: exec, a subsystem.

        A connection that turns out to be dead is made anew, once. Raises NodeUnreachable; whatever else `start` raises.
        """
        if not self._connection.sessions.acquire(timeout=timeout):
            raise NodeUnreachable(
                self.node,
                f"all {CHANNELS} channels of its ssh connection were in use for {timeout:g} s",
                "fewer commands at once",
            )
        try:
            try:
                return self._start_in_turn(start, timeout)
            except _Died:
                return self._start_in_turn(start, timeout)
        except BaseException as error:
            self._connection.sessions.release()
            if isinstance(error, _Died):
                raise self.lost(error) from error
            raise

    def _start_in_turn(self, start: Callable[[paramiko.Channel], T], timeout: float) -> tuple[Session, T]:
        """sshd counts a session until it has reaped its process, a moment longer than we do: then it is asked again."""
        deadline = time.monotonic() + min(timeout, _FULL_TIMEOUT)
        pause = 0.01
        while True:
            try:
                return self._start(start, timeout)
            except _Full as error:
                if self._connection.closed.wait(pause) or time.monotonic() > deadline:
                    raise NodeUnreachable(
                        self.node,
                        f"its sshd gives no further channel: {error}",
                        f"set MaxSessions to {CHANNELS + 2} or more there",
                    ) from error
                pause = min(0.5, pause * 2)

    def _start(self, start: Callable[[paramiko.Channel], T], timeout: float) -> tuple[Session, T]:
        transport = self._transport()
        began = time.monotonic()
        try:
            try:
                channel = transport.open_channel("session", timeout=timeout)
            except paramiko.SSHException as error:
                # not always a ChannelException: paramiko keeps one for all that are refused at once
                if transport.is_active() and time.monotonic() - began < timeout:
                    raise _Full(getattr(error, "text", "") or str(error)) from error
                raise
            try:
                channel.settimeout(timeout)
                begun = start(channel)
            except BaseException:
                channel.close()
                raise
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not has_ended(transport):
                raise self.lost(error) from error
            raise _Died(str(error) or type(error).__name__) from error
        return Session(channel, self._connection.sessions.release), begun

    def run(self, argv: Sequence[str], stdin: bytes | Iterable[bytes] = b"", timeout: float = 60.0) -> Done:
        """Run a command to its end; quoted for the node's shell word by word.

        A connection lost while it ran raises NodeUnreachable: whether it ran to its end is not known.
        """
        command, what = shlex.join(argv), shlex.join(argv[:3])[:60]
        session, _ = self.session(lambda channel: channel.exec_command(command), min(timeout, _OPEN_TIMEOUT))
        try:
            return self._drain(session.channel, stdin, time.monotonic() + timeout, what)
        finally:
            session.close()

    def dial(self, address: str, port: int, timeout: float) -> paramiko.Channel:
        """A TCP connection made by the node.

        Raises paramiko.ChannelException where the node says why not, TimeoutError, NodeUnreachable.
        """
        transport = self._transport()
        try:
            return self._connection.tunnel(transport, address, port, timeout)
        except (paramiko.SSHException, EOFError, OSError) as error:
            if isinstance(error, (paramiko.ChannelException, TimeoutError)):
                raise
            raise self.lost(error) from error

    def lost(self, error: Exception) -> NodeUnreachable:
        """The error for a connection that broke under a call."""
        words = str(error) or type(error).__name__
        return NodeUnreachable(
            self.node,
            f"the ssh connection to {self.host} was lost ({words})",
            f"is the node still up? try it: ssh {self.host} true",
        )

    def _transport(self) -> paramiko.Transport:
        try:
            return self._connection.transport()
        except LauncherError as error:
            where = self.node if error.where in (self.node, self.host) else f"{self.node} (through {error.where})"
            raise type(error)(where, error.what, error.next_step) from error

    def _drain(self, channel: paramiko.Channel, stdin: bytes | Iterable[bytes], deadline: float, what: str) -> Done:
        """Both streams at once, while stdin is fed: neither side can wait for the other."""
        started = time.time()
        first = 0.0
        out, err = bytearray(), bytearray()
        channel.settimeout(max(0.1, deadline - time.monotonic()))
        wake = threading.Event()  # whichever stream has something, or its end
        channel.in_buffer.set_event(wake)
        channel.in_stderr_buffer.set_event(wake)
        feeder = _feed(channel, stdin)
        while True:
            ended = channel.eof_received or channel.closed  # asked before the streams: what they hold came before it
            if channel.recv_ready():
                out += channel.recv(_PIECE)
                first = first or time.time()
            elif channel.recv_stderr_ready():
                err += channel.recv_stderr(_PIECE)
            elif ended:
                break
            elif not wake.wait(deadline - time.monotonic()):
                raise NodeUnreachable(
                    self.node, f"`{what}` did not end in time", "is the node overloaded, or its disk?"
                )
        if not channel.status_event.wait(min(_EXIT_TIMEOUT, max(0.1, deadline - time.monotonic()))):
            raise NodeUnreachable(self.node, f"`{what}` ended without an exit status", "look at the node's sshd")
        if channel.exit_status == -1 and has_ended(channel.get_transport()):
            raise self.lost(EOFError(f"while `{what}` ran"))
        if feeder:
            feeder.join()
        return Done(channel.exit_status, bytes(out), bytes(err), started, first or time.time())


def _feed(channel: paramiko.Channel, stdin: bytes | Iterable[bytes]) -> threading.Thread | None:
    """Write stdin and end it; in a thread where it may have to wait for the command to read."""
    if isinstance(stdin, bytes) and len(stdin) <= _SMALL:
        if stdin:
            channel.sendall(stdin)
        channel.shutdown_write()
        return None
    pieces = (stdin,) if isinstance(stdin, bytes) else stdin

    def write() -> None:
        try:
            for piece in pieces:
                # sendall copies all that is left for every packet: small pieces keep that linear
                for start in range(0, len(piece), _PIECE):
                    channel.sendall(piece[start : start + _PIECE])
            channel.shutdown_write()
        except (OSError, EOFError):
            return  # it ended before it had read all: its exit code says more than we could

    thread = threading.Thread(target=write, daemon=True, name="ssh stdin")
    thread.start()
    return thread
