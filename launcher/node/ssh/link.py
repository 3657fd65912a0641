"""One ssh server: it is connected to when first asked for, and again when its connection has died."""

from __future__ import annotations

import contextlib
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import paramiko

from launcher.errors import HostKeyChanged, HostKeyUnknown, NodeUnreachable
from launcher.node.hub.waits import Event, Semaphore
from launcher.node.ssh import hostkeys
from launcher.node.ssh.config import Target, ssh_options
from launcher.node.ssh.hostkeys import KnownHosts, KnownHostsFiles, Verdict
from launcher.node.ssh.identities import KeyFiles, authenticate
from launcher.node.ssh.shell import NotBegun, Shell
from launcher.node.ssh.transport import HOST_KEY_ALGORITHMS, SshTransport, Wire, dial, handshake, run_proxy

CHANNELS = 8  # sessions at once on one connection: sshd's own limit is 10 (MaxSessions)
STARTS = 64  # connections being made at once
ALIVE_INTERVAL = 10.0  # seconds of silence before we ask for a sign of life
ALIVE_COUNT = 3  # unanswered intervals that make a connection dead
_SURE = 5.0  # seconds after a sign of life
_BUSY_PAUSE = 0.3  # sshd drops new connections while too many are starting (MaxStartups): seconds until the next try


@dataclass
class Shared:
    """What all links of a pool have in common."""

    ssh_config: str | None
    connect_timeout: float
    files: KeyFiles = field(default_factory=KeyFiles)
    known_hosts: KnownHostsFiles = field(default_factory=KnownHostsFiles)
    starts: Semaphore = field(default_factory=lambda: Semaphore(STARTS))
    closed: Event = field(default_factory=Event)


class _Attempt:
    """To connect, and what became of it when it is over."""

    def __init__(self) -> None:
        self.over = Event()
        self.outcome: SshTransport | BaseException | None = None


class Link:
    """One ssh server."""

    def __init__(self, shared: Shared, target: Target, hop: Link | None) -> None:
        self.target = target
        self.hop = hop  # the jump host that it is reached through
        self.depth: int = hop.depth + 1 if hop else 0
        self.sessions = Semaphore(CHANNELS)
        self.closing = shared.closed
        self._shared = shared
        self._lock = threading.Lock()
        self._transport: SshTransport | None = None
        self._attempt: _Attempt | None = None
        self._shell: Shell | None = None
        self._shell_lock = threading.Lock()

    def transport(self) -> SshTransport:
        """A live connection; several threads that ask while it is being made share one attempt and its outcome.

        Raises NodeUnreachable, HostKeyUnknown, HostKeyChanged, AuthFailed, UsageError; where: the alias that failed.
        """
        with self._lock:
            if self._transport is not None and self._transport.is_active():
                return self._transport
            mine = self._attempt is None
            attempt = self._attempt = self._attempt or _Attempt()
        if mine:
            try:
                attempt.outcome = self._connect()
            except BaseException as error:  # noqa: BLE001 - whatever it is, all who wait for it get it
                attempt.outcome = error
            with self._lock:
                if isinstance(attempt.outcome, SshTransport):
                    self._transport = attempt.outcome
                self._attempt = None
            attempt.over.set()
        attempt.over.wait()
        if isinstance(attempt.outcome, SshTransport):
            return attempt.outcome
        assert attempt.outcome is not None
        raise attempt.outcome

    @contextlib.contextmanager
    def shell(self, make: Callable[[], Shell]) -> Iterator[Shell]:
        """The shell that is kept open there, for one caller.

        Raises NotBegun while another has it, and when nothing was heard for a while: a command sent into a connection
        that is dead could not be told from one that has run, while a new channel says so. Also what make raises.
        """
        transport = self._transport
        silent = transport is not None and time.monotonic() - transport.wire.heard > _SURE
        if silent or not self._shell_lock.acquire(blocking=False):
            raise NotBegun
        try:
            if self._shell is None or not self._shell.alive:
                self._drop_shell()
                self._shell = make()
            try:
                yield self._shell
            except BaseException:
                self._drop_shell()
                raise
        finally:
            self._shell_lock.release()

    def close_shell(self) -> bool:
        """Give its channel to somebody else. Whether there was one that nobody uses."""
        if not self._shell_lock.acquire(blocking=False):
            return False
        try:
            return self._drop_shell()
        finally:
            self._shell_lock.release()

    def _drop_shell(self) -> bool:
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.close()
        return shell is not None

    @property
    def timeout(self) -> float:
        return self.target.connect_timeout or self._shared.connect_timeout

    def check_alive(self) -> None:
        """End a connection from which nothing came for too long: every call that waits on it wakes with an error."""
        transport = self._transport
        if transport is None or not transport.is_active():
            return
        count = self.target.alive_count if self.target.alive_interval else ALIVE_COUNT
        if time.monotonic() - transport.wire.heard > self._alive_interval * (max(1, count) + 0.5):
            transport.wire.close()

    @property
    def _alive_interval(self) -> float:
        return self.target.alive_interval or ALIVE_INTERVAL

    def close(self) -> None:
        with self._lock:
            transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _connect(self) -> SshTransport:
        hop = self.hop.transport() if self.hop else None
        deadline = time.monotonic() + self.timeout
        while (transport := self._connect_once(hop, deadline)) is None:
            if self._shared.closed.wait(_BUSY_PAUSE) or time.monotonic() + _BUSY_PAUSE > deadline:
                raise NodeUnreachable(
                    self.target.alias,
                    f"{self._where} ends every connection before it says that it speaks ssh",
                    "look at its sshd: its log, MaxStartups, a firewall or /etc/hosts.deny",
                )
        return transport

    def _connect_once(self, hop: SshTransport | None, deadline: float) -> SshTransport | None:
        """None when the server hung up before any key exchange: a busy sshd does."""
        wire = self._wire(hop, deadline)
        queued = time.monotonic()
        try:
            with self._shared.starts:
                deadline += time.monotonic() - queued  # the queue is no fault of the node
                known = self._known_hosts()
                order = hostkeys.order_algorithms(self.target, known, HOST_KEY_ALGORITHMS)
                transport = self._handshake(wire, order, deadline)
                if transport is not None:
                    self._prove_host(transport, known)
                    authenticate(transport, self.target, self._shared.files, deadline)
        except BaseException:
            wire.close()
            raise
        if transport is None:
            wire.close()
        else:
            transport.watch(self._alive_interval)
        return transport

    def _wire(self, hop: SshTransport | None, deadline: float) -> Wire:
        target = self.target
        try:
            if hop is not None:
                return Wire(hop.open("direct-tcpip", deadline - time.monotonic(), (target.hostname, target.port)))
            if target.proxy_command:
                return run_proxy(target.proxy_command)
            return Wire(dial(target.hostname, target.port, deadline, target.family, target.bind_address))
        except paramiko.ChannelException as error:
            why = f"jump host {target.proxy_jump[-1]} cannot reach {self._where}: {error.text or 'it may not forward'}"
            raise NodeUnreachable(target.alias, why, f"try it: ssh {target.alias} true") from error
        except socket.gaierror as error:
            raise NodeUnreachable(
                target.alias,
                f"the name {target.hostname} is unknown ({error.strerror})",
                "check its spelling, or add a Host with its HostName to your ssh config",
            ) from error
        except ConnectionRefusedError as error:
            raise NodeUnreachable(
                target.alias,
                f"{self._where} refuses connections",
                f"is sshd running there, and is {target.port} its port?",
            ) from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._no_answer(error) from error

    def _handshake(self, wire: Wire, order: list[str], deadline: float) -> SshTransport | None:
        try:
            return handshake(wire, order, deadline)
        except (EOFError, OSError, paramiko.SSHException) as error:
            if complaint := wire.complaint():
                raise NodeUnreachable(
                    self.target.alias, f"its ProxyCommand failed: {complaint}", f"try it: ssh {self.target.alias} true"
                ) from error
            if time.monotonic() > deadline - 0.05 or isinstance(error, TimeoutError):
                raise self._no_answer(TimeoutError("no ssh handshake within the time limit")) from error
            if isinstance(error, (EOFError, ConnectionResetError)) or "protocol banner" in str(error):
                return None
            raise self._no_answer(error) from error

    def _no_answer(self, error: Exception) -> NodeUnreachable:
        words = f"no answer within {self.timeout:g} s" if isinstance(error, TimeoutError) else str(error) or repr(error)
        return NodeUnreachable(
            self.target.alias,
            f"{self._where}: {words}",
            f"is it on, and is the way to it open? try it: ssh {self.target.alias} true",
        )

    @property
    def _where(self) -> str:
        return f"{self.target.hostname} port {self.target.port}"

    def _known_hosts(self) -> KnownHosts:
        try:
            return self._shared.known_hosts.load((*self.target.known_hosts, *self.target.global_known_hosts))
        except OSError as error:
            raise HostKeyUnknown(
                self.target.alias, f"its host key cannot be checked: {error}", "make that file readable for you"
            ) from error

    def _prove_host(self, transport: SshTransport, known: KnownHosts) -> None:
        """What OpenSSH does with the key that the server showed. Raises HostKeyUnknown, HostKeyChanged."""
        target, key = self.target, transport.get_remote_server_key()
        blob = key.asbytes()
        finding = hostkeys.judge(target, known, key.get_name(), blob)
        shown = f"{key.get_name()} {hostkeys.fingerprint(blob)}"
        options = [*ssh_options(self._shared.ssh_config), "-o", "StrictHostKeyChecking=ask"]
        accept = shlex.join(["ssh", *options, target.alias, "true"])
        file = next(iter(target.known_hosts), "~/.ssh/known_hosts")
        if finding.verdict is Verdict.REVOKED:
            raise HostKeyChanged(
                target.alias,
                f"the host key it shows ({shown}) is revoked in {', '.join(finding.places)}",
                "do not connect: ask who runs the node for its new host key",
            )
        if finding.verdict is Verdict.CHANGED and target.strict != "no":
            raise HostKeyChanged(
                target.alias,
                f"it shows another host key ({shown}) than {', '.join(finding.places)} says: "
                "the node was made anew, or somebody stands in the way",
                f"compare with `ssh-keygen -lf` on the node; when right: ssh-keygen -R '{target.known_as}' -f {file}",
            )
        if finding.verdict is Verdict.UNKNOWN:
            if target.strict not in ("no", "accept-new"):
                raise HostKeyUnknown(
                    target.alias,
                    f"its host key ({shown}) is in no known_hosts file",
                    f"see it: ssh-keyscan -p {target.port} {target.hostname} | ssh-keygen -lf -; "
                    f"when it is the node's own, accept it: {accept}",
                )
            hostkeys.remember(target, key.get_name(), blob)
