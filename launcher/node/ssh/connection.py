"""All ssh connections of this process: one per server, shared by all nodes and jump hosts on that server.

A connection is made on first use, and again after it was lost.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import paramiko

from launcher.errors import NodeUnreachable, UsageError
from launcher.node.parallel import in_background
from launcher.node.ssh import certificates, known_hosts
from launcher.node.ssh.config import CONNECT_TIMEOUT, Resolver, SshTarget
from launcher.node.ssh.handshake import handshake, open_tunnel
from launcher.node.ssh.identities import KeyFiles, authenticate
from launcher.node.ssh.wire import SshSocket, dial, run_proxy

CHANNELS = 8  # concurrent sessions per connection: sshd's own limit is 10 (MaxSessions)
_STARTS = 64  # connections being made at the same time
_ALIVE_INTERVAL = 10.0  # seconds of silence before the server is pinged
_ALIVE_COUNT = 3  # silent intervals after which a connection counts as lost
_WATCH_INTERVAL = 1.0
_BUSY_PAUSE = 0.3  # seconds until the next attempt: sshd drops connections while too many start (MaxStartups)


class Connection:
    """A connection to an ssh server. Thread-safe."""

    def __init__(self, pool: SshPool, target: SshTarget, hop: Connection | None, index: int = 0) -> None:
        self.target = target
        self.hop = hop  # the jump host through which it is reached
        self.index = index  # among the connections to this server
        self.sessions = threading.Semaphore(CHANNELS)
        self.full = False  # whether sshd allows fewer sessions than CHANNELS (MaxSessions)
        self.closed = pool.closed
        self._pool = pool
        self._timeout = target.connect_timeout or pool.connect_timeout
        self._address = f"{target.hostname} port {target.port}"
        self._lock = threading.Lock()
        self.live: tuple[paramiko.Transport, SshSocket] | None = None
        self._attempt: Callable[[], paramiko.Transport] | None = None
        self._pinging = False

    def transport(self) -> paramiko.Transport:
        """Return a live connection; concurrent callers share one attempt to connect and its outcome.

        Raises NodeUnreachable, HostKeyUnknown, HostKeyChanged, AuthFailed, UsageError; where: the alias that failed.
        """
        with self._lock:
            if self.live is not None and self.live[0].is_active():
                return self.live[0]
            attempt = self._attempt = self._attempt or in_background(self._connect)
        try:
            return attempt()
        finally:
            with self._lock:
                if self._attempt is attempt:
                    self._attempt = None

    def next(self) -> Connection:
        """Return another connection to the server, not made yet, for sessions that sshd refuses on this one."""
        return self._pool.add(Connection(self._pool, self.target, self.hop, self.index + 1))

    def check_alive(self) -> None:
        """Ping a silent server; if it stays silent, close the connection, so that all waiting calls fail."""
        live = self.live
        if live is None or not live[0].is_active():
            return
        transport, wire = live
        interval = self.target.alive_interval or _ALIVE_INTERVAL
        count = self.target.alive_count if self.target.alive_interval else _ALIVE_COUNT
        silence = time.monotonic() - wire.heard
        if silence <= interval:
            return
        if not self._pinging:  # always ping first: this process itself may have been suspended
            self._pinging = True
            in_background(partial(self._ping, transport))
        elif silence > interval * (max(1, count) + 0.5):
            wire.close()

    def _ping(self, transport: paramiko.Transport) -> None:
        """Wait for a reply, or the end of the connection. paramiko's set_keepalive does not ask for a reply."""
        with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
            transport.global_request("keepalive@openssh.com", wait=True)
        self._pinging = False

    def close(self) -> None:
        with self._lock:
            live, self.live = self.live, None
        if live is not None:
            live[1].close()
            live[0].close()

    def _connect(self) -> paramiko.Transport:
        hop = self.hop.transport() if self.hop else None
        deadline = time.monotonic() + self._timeout
        while True:
            wire = self._open_wire(hop, deadline)
            try:
                queued = time.monotonic()
                with self._pool.starts:
                    deadline += time.monotonic() - queued  # the time in our queue does not count
                    transport = self._start(wire, deadline)
                with self._lock:
                    if transport is not None and not self.closed.is_set():
                        self.live = transport, wire
                        return transport
            except BaseException:
                wire.close()
                raise
            wire.close()
            if self.closed.wait(_BUSY_PAUSE) or time.monotonic() + _BUSY_PAUSE > deadline:
                what = f"{self._address} closes connections before sending an SSH banner"
                fix = "check its sshd: the log, MaxStartups, firewalls and /etc/hosts.deny"
                raise NodeUnreachable(self.target.alias, what, fix)

    def _start(self, wire: SshSocket, deadline: float) -> paramiko.Transport | None:
        """Return None if the server hung up before the key exchange, as a busy sshd does."""
        known = known_hosts.load(self.target)
        transport = self._handshake(wire, known_hosts.order_algorithms(self.target, known), deadline)
        if transport is not None:
            key = transport.get_remote_server_key()
            if not certificates.verify(self.target, known, key):
                known_hosts.verify(self.target, known, key.get_name(), key.asbytes())
            authenticate(transport, self.target, self._pool.key_files, deadline)
        return transport

    def _open_wire(self, hop: paramiko.Transport | None, deadline: float) -> SshSocket:
        target = self.target
        try:
            if hop is not None:
                return SshSocket(open_tunnel(hop, target.hostname, target.port, deadline - time.monotonic()))
            if target.proxy_command:
                return run_proxy(target.proxy_command)
            return SshSocket(dial(target.hostname, target.port, deadline, target.family, target.bind_address))
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._no_answer(error) from error

    def _handshake(self, wire: SshSocket, order: list[str], deadline: float) -> paramiko.Transport | None:
        try:
            return handshake(wire, order, deadline)
        except (EOFError, OSError, paramiko.SSHException) as error:
            if message := wire.proxy_errors():
                what, fix = f"its ProxyCommand failed: {message}", f"run: {self.target.typed('true')}"
                raise NodeUnreachable(self.target.alias, what, fix) from error
            if time.monotonic() > deadline - 0.05 or isinstance(error, TimeoutError):
                raise self._no_answer(TimeoutError("no ssh handshake within the time limit")) from error
            if isinstance(error, (EOFError, ConnectionResetError)) or "protocol banner" in str(error):
                return None
            raise self._no_answer(error) from error

    def _no_answer(self, error: Exception) -> NodeUnreachable:
        target, address = self.target, self._address
        fix = f"check that the node is up and reachable from this machine: {target.typed('true')}"
        if isinstance(error, paramiko.ChannelException):
            what = f"jump host {target.proxy_jump[-1]} cannot reach {address}: {error.text}"
        elif isinstance(error, socket.gaierror):
            what = f"could not resolve host name {target.hostname} ({error.strerror})"
            fix = "check the spelling, or add a Host entry with a HostName to your ssh config"
        elif isinstance(error, ConnectionRefusedError):
            what, fix = f"{address} refuses connections", f"check that sshd is running there on port {target.port}"
        elif isinstance(error, TimeoutError):
            what = f"{address}: no response within {self._timeout:g} s"
        else:
            what = f"{address}: {str(error) or repr(error)}"
        return NodeUnreachable(target.alias, what, fix)


class SshPool:
    """All ssh connections of this process, by target."""

    def __init__(
        self, ssh_config: str | None, connect_timeout: float = CONNECT_TIMEOUT, resolver: Resolver | None = None
    ) -> None:
        """resolver: one in use already, for the same config. connect_timeout: seconds, if the config sets none."""
        self.ssh_config = ssh_config
        self._resolver = resolver or Resolver(ssh_config)
        self.connect_timeout = connect_timeout
        self.key_files = KeyFiles()
        self.starts = threading.Semaphore(_STARTS)
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._connections: dict[tuple[SshTarget, int], Connection] = {}
        threading.Thread(target=self._watch, name="ssh keepalive", daemon=True).start()

    def connection(self, alias: str, through: tuple[str, ...] = (), before: tuple[SshTarget, ...] = ()) -> Connection:
        """Return the connection to a host through its jump hosts, not made yet.

        through: jump hosts instead of its own; `ssh -J a,b host` reaches host through b, and b through a. before: the
        hosts that are reached through it. Raises UsageError for a name or a configuration that OpenSSH rejects, or if
        the jump hosts form a cycle.
        """
        target = self._resolver.begin(alias)()
        if through:
            target = replace(target, proxy_jump=through)
        if target in before:
            fix = f"check ProxyJump in the output of: {target.typed(program=('ssh', '-G'))}"
            raise UsageError(alias, "its jump hosts form a cycle", fix)
        jump = target.proxy_jump
        hop = self.connection(jump[-1], jump[:-1], (*before, target)) if jump else None
        return self.add(Connection(self, target, hop))

    def add(self, connection: Connection) -> Connection:
        """Register a connection; return it, or the equal one that was added before."""
        with self._lock:
            return self._connections.setdefault((connection.target, connection.index), connection)

    def close(self) -> None:
        """Close all connections."""
        self.closed.set()
        with self._lock:
            connections = list(self._connections.values())
        for connection in reversed(connections):  # jump hosts precede the hosts behind them
            connection.close()

    def _watch(self) -> None:
        while not self.closed.wait(_WATCH_INTERVAL):
            with self._lock:
                connections = list(self._connections.values())
            for connection in connections:
                connection.check_alive()
