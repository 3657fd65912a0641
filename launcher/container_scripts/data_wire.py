"""What two nodes say to each other while data is copied: messages over TLS, both sides with a certificate.

The certificates are made for one transfer, by an authority that exists for it alone; a node accepts exactly the peer
that its launcher named. A message is a kind, a length and its bytes; a longer one than is allowed ends the connection.
Python 3.8 without packages.
"""

from __future__ import annotations

import contextlib
import io
import queue
import select
import socket
import ssl
import struct
import tempfile
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.container_scripts.data_tree import PIECE, RefusedError
else:
    from data_tree import PIECE, RefusedError

LIST, KNOWN, START, NEED, ALL_NEED, DATA, ZEROS, DIGESTS, END, DONE = range(10)
LONGEST = 1 << 26  # bytes of a message: a batch of long names
HANDSHAKE_TIMEOUT = 10.0
DIAL_TIMEOUT = 5.0
PEER_TIMEOUT = 60.0  # for the neighbour to be ready
STRANGERS = 32  # connections at a time that have not proven who they are
# Not TCP_USER_TIMEOUT: it also ends a connection whose receiver is alive and slow (a window of zero, a busy disk)
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
_HEAD = struct.Struct(">BI")
_QUEUED = 16  # messages that wait to be sent


class LostError(Exception):
    """The connection to a neighbour is gone. `where` is `upstream` or `downstream`."""

    def __init__(self, where: str, why: object) -> None:
        super().__init__(f"lost the node that is {where}: {why}")
        self.where = where


def context(config: dict[str, Any], *, server: bool) -> ssl.SSLContext:
    """config: authority, certificate and key as PEM text."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.check_hostname = False  # the name is checked below: an address proves nothing
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=config["authority"])
    with tempfile.NamedTemporaryFile(dir=config["private"]) as file:  # mode 0600; ssl reads keys from files only
        file.write((config["certificate"] + config["key"]).encode())
        file.flush()
        made.load_cert_chain(file.name)
    return made


def _is(secured: ssl.SSLSocket, name: str) -> bool:
    subject: Any = (secured.getpeercert() or {}).get("subject", ())
    return (("commonName", name),) in subject


def _tuned(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def listen() -> socket.socket:
    """On a free port of all addresses."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=16, dualstack_ipv6=family == socket.AF_INET6)


def accept(listener: socket.socket, secure: ssl.SSLContext, name: str) -> Link:
    """The peer of that name; all others are sent away, and hold nobody up. Raises LostError."""
    found: queue.Queue[ssl.SSLSocket] = queue.Queue()
    strangers = threading.Semaphore(STRANGERS)

    def greet(connection: socket.socket) -> None:
        try:
            connection.settimeout(HANDSHAKE_TIMEOUT)
            secured = secure.wrap_socket(connection, server_side=True)
            if _is(secured, name):
                found.put(secured)
                return
            secured.close()
        except (OSError, ValueError):
            connection.close()
        finally:
            strangers.release()

    def serve() -> None:
        with contextlib.suppress(OSError):  # the listener is closed when the peer is there
            while True:
                connection = listener.accept()[0]
                if strangers.acquire(blocking=False):
                    _tuned(connection)
                    threading.Thread(target=greet, args=(connection,), daemon=True).start()
                else:
                    connection.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        return Link(found.get(timeout=PEER_TIMEOUT), "upstream")
    except queue.Empty:
        raise LostError("upstream", f"it did not connect in {PEER_TIMEOUT:.0f} s") from None
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        listener.close()


def dial(addresses: list[list[Any]], secure: ssl.SSLContext, name: str) -> Link:
    """The peer of that name at the first address where it answers. Raises LostError."""
    why: object = "it has no address"
    for address, port in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=DIAL_TIMEOUT)
            _tuned(connection)
            connection.settimeout(PEER_TIMEOUT)
            secured = secure.wrap_socket(connection)
        except OSError as error:
            why = f"{address} port {port}: {error}"
            continue
        if _is(secured, name):
            return Link(secured, "downstream")
        why = f"{address} port {port}: another machine answers"
        secured.close()
    raise LostError("downstream", why)


class _Duplex(io.RawIOBase):
    """A TLS connection that is read by one thread and written by another.

    OpenSSL takes one call at a time: the tickets that follow a handshake are read while the first message is written,
    and where both happened at once the connection hung. So no call waits, and each is made under a lock.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        connection.setblocking(False)
        self._connection, self._lock = connection, threading.Lock()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._when_ready(partial(self._connection.recv_into, buffer))

    def sendall(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._when_ready(partial(self._connection.send, rest)) :]

    def _when_ready(self, call: Callable[[], int]) -> int:
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                waited_for = select.POLLIN
            except ssl.SSLWantWriteError:
                waited_for = select.POLLOUT
            poller = select.poll()
            poller.register(self._connection, waited_for)
            poller.poll()


class Link:
    """Messages to and from a neighbour. What is sent goes out by a thread of its own, small ones together."""

    def __init__(self, connection: ssl.SSLSocket, where: str) -> None:
        self._connection, self.where = _Duplex(connection), where
        self._input = io.BufferedReader(self._connection, 1 << 18)
        self._output: queue.Queue[tuple[int, bytes] | None] = queue.Queue(_QUEUED)
        self._error: Exception | None = None
        self.sent = 0  # bytes of messages
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()

    def send(self, kind: int, data: bytes = b"") -> None:
        """Raises LostError, perhaps for an earlier message."""
        while True:
            if self._error:
                raise LostError(self.where, self._error)
            with contextlib.suppress(queue.Full):
                self._output.put((kind, data), timeout=1.0)
                return

    def _send(self) -> None:
        waiting = bytearray()
        while True:
            message = self._output.get()
            if message is not None:
                waiting += _HEAD.pack(message[0], len(message[1]))
                waiting += message[1]
                if len(waiting) < PIECE and not self._output.empty():
                    continue
            try:
                self._connection.sendall(waiting)
            except (OSError, ValueError) as error:
                self._error = error
                return
            self.sent += len(waiting)
            waiting = bytearray()
            if message is None:
                return

    def close(self) -> None:
        """All that was sent has left this process then, unless the connection is lost."""
        if self._error is None:
            self._output.put(None)
            self._sender.join(PEER_TIMEOUT)

    def receive(self, *kinds: int) -> tuple[int, bytes]:
        """The next message, of one of these kinds. Raises LostError; RefusedError for any other."""
        try:
            kind, size = _HEAD.unpack(self._exactly(_HEAD.size))
            if kind not in kinds or size > LONGEST:
                raise RefusedError(f"the node that is {self.where} sent what was not expected: {kind}, {size} bytes")
            return kind, self._exactly(size)
        except (OSError, ValueError) as error:
            raise LostError(self.where, error) from error

    def _exactly(self, size: int) -> bytes:
        data: bytes | None = self._input.read(size)
        if data is None or len(data) < size:
            raise LostError(self.where, self._error or "the connection was closed")
        return data
