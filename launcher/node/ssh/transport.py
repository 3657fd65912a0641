"""One ssh connection: the wire that it runs over, the handshake with the host key proven, whether it still lives."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import tempfile
import threading
import time
import types
from collections.abc import Sequence
from contextvars import ContextVar
from typing import IO, Protocol

import paramiko
import paramiko.auth_handler
import paramiko.buffered_pipe

from launcher.node.hub.loop import HUB
from launcher.node.hub.sockets import HubSocket, connect
from launcher.node.hub.waits import Condition, Event

# aes128-gcm needs no separate MAC: 2 to 3 times the bytes a second of paramiko's own first choice, aes128-ctr
FAST_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr")
HOST_KEY_ALGORITHMS = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)
_NUMERIC = re.compile(r"\d+\.\d+\.\d+\.\d+|[0-9a-fA-F:]*:[0-9a-fA-F:.]*")  # nothing that needs a resolver
_AHEAD = 1 << 15
_LOG = "launcher.ssh"
_PING = "keepalive@openssh.com"
_channel: ContextVar[int] = ContextVar("channel", default=-1)  # that a thread or a greenlet is opening

# What paramiko waits with: a thread stops in them, a greenlet gives way. Its own lock for whole packets (an RLock, so
# any greenlet's) is never held over a wait: HubSocket.send knows none.
_waits = types.SimpleNamespace(**{**vars(threading), "Condition": Condition, "Event": Event})
for _module in (paramiko.transport, paramiko.channel, paramiko.buffered_pipe, paramiko.auth_handler):
    _module.threading = _waits  # type: ignore[attr-defined]


class Stream(Protocol):
    """What a connection can run over: a socket, or a channel of another connection."""

    def send(self, data: bytes, /) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def settimeout(self, timeout: float | None, /) -> None: ...
    def close(self) -> None: ...


class Wire:
    """A stream that knows when the other side was last heard."""

    def __init__(self, stream: Stream, command: subprocess.Popen[bytes] | None = None, words: IO[bytes] | None = None):
        self._stream = HubSocket(stream) if isinstance(stream, socket.socket) else stream
        self._command = command  # the ProxyCommand behind it
        self._words = words  # what that wrote to stderr
        self._closed = False  # paramiko's stop_thread reads this name
        self._ahead = b""  # read, not asked for yet: paramiko asks twice a packet
        self.heard = time.monotonic()

    def send(self, data: bytes) -> int:
        return self._stream.send(data)

    def recv(self, size: int) -> bytes:
        if not self._ahead:
            self._ahead = self._stream.recv(max(size, _AHEAD))
            self.heard = time.monotonic()
        data, self._ahead = self._ahead[:size], self._ahead[size:]
        return data

    def settimeout(self, timeout: float | None) -> None:
        self._stream.settimeout(timeout)

    @property
    def in_hub(self) -> bool:
        """Whether what reads from here is a greenlet; else it is a thread."""
        return isinstance(self._stream, HubSocket)

    def close(self) -> None:
        """End it now: whoever waits in recv() wakes at once."""
        if self._closed:
            return
        self._closed = True
        self._stream.close()
        if self._command:
            self._command.terminate()
            threading.Thread(target=self._command.wait, daemon=True).start()

    def complaint(self) -> str:
        """The last words of the ProxyCommand, "" where there are none."""
        if not self._words:
            return ""
        self._words.seek(0)
        return self._words.read(4096).decode(errors="replace").strip()


class SshTransport(paramiko.Transport):
    """paramiko's Transport, which keeps apart why each channel was refused; it remembers one reason for all threads."""

    # A thread of its own looks up from silence this often (seconds); 0.1, as in paramiko, is 7 % of a core at 200 nodes
    _active_check_timeout = 0.5

    def __init__(self, wire: Wire, host_key_algorithms: Sequence[str]) -> None:
        # paramiko asks of its socket only what Wire has
        super().__init__(wire, default_window_size=8 << 20)  # type: ignore[arg-type]
        self.wire = wire
        self._refused: dict[int, paramiko.ChannelException] = {}
        self.set_log_channel(_LOG)
        # it would start a thread that waits; handshake() looks at the time itself
        self.packetizer.start_handshake = _no_timer  # type: ignore[method-assign]
        options = self.get_security_options()
        ciphers = [name for name in FAST_CIPHERS if name in options.ciphers]
        options.ciphers = [*ciphers, *(name for name in options.ciphers if name not in ciphers)]
        options.key_types = [name for name in host_key_algorithms if name in options.key_types]

    def start(self) -> None:
        if self.wire.in_hub:
            HUB.spawn(self.run)
        else:
            super().start()

    def open(self, kind: str, timeout: float, destination: tuple[str, int] | None = None) -> paramiko.Channel:
        """A channel. Raises paramiko.ChannelException with the server's own reason, SSHException, EOFError, OSError."""
        _channel.set(-1)
        try:
            return self.open_channel(kind, destination, ("127.0.0.1", 0) if destination else None, timeout=timeout)
        except (paramiko.SSHException, EOFError, OSError) as error:
            refused = self._refused.pop(_channel.get(), None)
            if refused is not None:
                raise refused from error
            raise

    def ping(self) -> None:
        """Ask the server for any answer; when it comes, the wire has heard it."""
        if not self.clear_to_send.is_set():  # keys are being exchanged: it would wait here
            return
        message = paramiko.Message()
        message.add_byte(paramiko.common.cMSG_GLOBAL_REQUEST)
        message.add_string(_PING)
        message.add_boolean(True)
        # global_request() cannot ask for an answer without waiting for it in this thread, the one that reads answers
        self._send_user_message(message)  # type: ignore[attr-defined]

    def watch(self, interval: float) -> None:
        """Ping whenever nothing was sent for `interval` seconds."""
        self.packetizer.set_keepalive(interval, self.ping)

    def close(self) -> None:
        self.wire.close()
        super().close()

    def _log(self, *_: object) -> None:
        """paramiko's words about every message: nobody reads them."""

    def _next_channel(self) -> int:
        # called by open_channel in the thread that asks
        number = int(super()._next_channel())  # type: ignore[misc]
        _channel.set(number)
        return number

    def _parse_channel_open_failure(self, message: paramiko.Message) -> None:
        number, code = message.get_int(), message.get_int()
        self._refused[number] = paramiko.ChannelException(code, message.get_text())
        message.rewind()
        super()._parse_channel_open_failure(message)  # type: ignore[misc]


def _no_timer(timeout: float) -> None:
    """In place of Packetizer.start_handshake."""


def handshake(wire: Wire, host_key_algorithms: Sequence[str], deadline: float) -> SshTransport:
    """Exchange keys with the server, prove nothing yet. `deadline` is of time.monotonic().

    Raises TimeoutError, EOFError (it hung up), OSError, paramiko.SSHException.
    """
    # without a handler Python prints a library's warnings on the user's terminal
    log = logging.getLogger(_LOG)
    if not log.handlers:
        log.addHandler(logging.NullHandler())
        log.propagate = False
    transport = SshTransport(wire, host_key_algorithms)
    left = max(0.1, deadline - time.monotonic())
    transport.banner_timeout = transport.handshake_timeout = left
    over = Event()  # without one start_client looks up ten times a second
    try:
        transport.start_client(over)
        over.wait(left)
    except BaseException:
        transport.close()
        raise
    if not transport.is_active():
        raise transport.get_exception() or paramiko.SSHException("it ended the key exchange")
    if not transport.initial_kex_done:  # its time is over
        transport.close()
        raise TimeoutError("the ssh handshake did not end in time")
    return transport


def dial(host: str, port: int, deadline: float, family: int = socket.AF_UNSPEC, bind: str = "") -> socket.socket:
    """A TCP connection to the first address that answers. Raises socket.gaierror, TimeoutError, OSError."""
    addresses = look_up(host, port, deadline, family)
    last: OSError = TimeoutError("timed out")
    for place, (kind, address) in enumerate(addresses):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        connection = socket.socket(kind, socket.SOCK_STREAM)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else 40 ms waits, Nagle on delayed acks
            if bind:
                connection.bind((bind, 0))
            # the first of several addresses may not use up the time of the others
            connect(connection, address, left / (len(addresses) - place))
        except OSError as error:
            connection.close()
            last = error
        else:
            return connection
    raise last


def look_up(host: str, port: int, deadline: float, family: int) -> list[tuple[int, tuple[object, ...]]]:
    """(address family, socket address) of a host. The resolver itself knows no time limit, so it waits in a thread."""
    if _NUMERIC.fullmatch(host):
        return _addresses(host, port, family, socket.AI_NUMERICHOST)
    answer: list[list[tuple[int, tuple[object, ...]]] | OSError] = []
    over = Event()

    def ask() -> None:
        try:
            answer.append(_addresses(host, port, family))
        except OSError as error:
            answer.append(error)
        over.set()

    threading.Thread(target=ask, daemon=True, name=f"resolve {host}").start()
    over.wait(max(0.0, deadline - time.monotonic()))
    if not answer:
        raise TimeoutError(f"the name {host} was not resolved in time")
    if isinstance(answer[0], OSError):
        raise answer[0]
    return answer[0]


def _addresses(host: str, port: int, family: int, flags: int = 0) -> list[tuple[int, tuple[object, ...]]]:
    name = host.encode() if host.isascii() else host  # as text it would load the tables of IDNA
    found = socket.getaddrinfo(name, port, family, socket.SOCK_STREAM, 0, flags)
    return [(int(kind), tuple(address)) for kind, _, _, _, address in found]


def run_proxy(command: str) -> Wire:
    """A wire through a ProxyCommand, which OpenSSH too gives to the user's shell. Raises OSError."""
    ours, theirs = socket.socketpair()
    words = tempfile.TemporaryFile()  # noqa: SIM115 - the wire keeps it
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"exec {command}"],  # from the user's own ssh config, by its own definition shell text
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=words,
            start_new_session=True,  # a Ctrl-C is for us, not for it
        )
    except BaseException:
        ours.close()
        words.close()
        raise
    finally:
        theirs.close()
    return Wire(ours, process, words)
