"""The protocol between two nodes of a transfer: messages over TLS, with certificates on both sides.

The certificates are issued for one transfer, by an authority that exists only for it; a node accepts only the peer
that the launcher named. A message is a kind, a length and its bytes; one over the limit ends the connection.
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

    from launcher.features.data.container_scripts.data_tree import PIECE, RefusedError
else:
    from data_tree import PIECE, RefusedError

LIST, KNOWN, START, NEED, ALL_NEED, DATA, ZEROS, DIGESTS, END, DONE = range(10)
LONGEST = 1 << 26  # bytes of a message: a batch of long names
HANDSHAKE_TIMEOUT = 10.0
DIAL_TIMEOUT = 5.0
PEER_TIMEOUT = 60.0  # seconds for the neighbour to connect
MAX_UNAUTHENTICATED = 32  # concurrent connections that are not authenticated yet
# Not TCP_USER_TIMEOUT: it also closes connections to a live but slow receiver (zero window, busy disk)
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
_BY_CLOCK = {9: "is not yet valid", 10: "has expired"}  # OpenSSL's X509_V_ERR_CERT_*
_REJECTED = ("SSLV3_ALERT_BAD_CERTIFICATE", "SSLV3_ALERT_CERTIFICATE_EXPIRED")
_HEAD = struct.Struct(">BI")
_QUEUED = 16  # messages waiting to be sent


class LostError(Exception):
    """The connection to a neighbour was lost. `where` is `upstream` or `downstream`."""

    def __init__(self, where: str, why: object) -> None:
        super().__init__(f"lost the connection to the {where} node: {explained(why)}")
        self.where = where


def explained(why: object) -> object:
    """Return the meaning of a TLS error: the clocks of two nodes may differ by more than certificates allow for."""
    if isinstance(why, ssl.SSLCertVerificationError) and why.verify_code in _BY_CLOCK:
        return f"the certificate {_BY_CLOCK[why.verify_code]} by this node's clock"
    if isinstance(why, ssl.SSLError) and why.reason in _REJECTED:
        return "it rejected the certificate, so its clock may be wrong"
    return why


def context(config: dict[str, Any], *, server: bool) -> ssl.SSLContext:
    """config: authority, certificate and key as PEM text."""
    created = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    created.minimum_version = ssl.TLSVersion.TLSv1_2
    created.check_hostname = False  # _is() checks the name: certificates are not bound to addresses
    created.verify_mode = ssl.CERT_REQUIRED
    created.load_verify_locations(cadata=config["authority"])
    with tempfile.NamedTemporaryFile(dir=config["private"]) as file:  # mode 0600; ssl reads keys from files only
        file.write((config["certificate"] + config["key"]).encode())
        file.flush()
        created.load_cert_chain(file.name)
    return created


def _is(secured: ssl.SSLSocket, name: str) -> bool:
    subject: Any = (secured.getpeercert() or {}).get("subject", ())
    return (("commonName", name),) in subject


def _tuned(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def listen() -> socket.socket:
    """Listen on a free port of all addresses."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=16, dualstack_ipv6=family == socket.AF_INET6)


def accept(listener: socket.socket, secure: ssl.SSLContext, name: str) -> Link:
    """Accept the peer with this name; reject all others without waiting for them. Raises LostError."""
    found: queue.Queue[ssl.SSLSocket] = queue.Queue()
    unauthenticated = threading.Semaphore(MAX_UNAUTHENTICATED)

    def authenticate(connection: socket.socket) -> None:
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
            unauthenticated.release()

    def serve() -> None:
        with contextlib.suppress(OSError):  # the listener is closed once the peer has connected
            while True:
                connection = listener.accept()[0]
                if unauthenticated.acquire(blocking=False):
                    _tuned(connection)
                    threading.Thread(target=authenticate, args=(connection,), daemon=True).start()
                else:
                    connection.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        return Link(found.get(timeout=PEER_TIMEOUT), "upstream")
    except queue.Empty:
        raise LostError("upstream", f"it did not connect within {PEER_TIMEOUT:.0f} s") from None
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        listener.close()


def dial(addresses: list[list[Any]], secure: ssl.SSLContext, name: str) -> Link:
    """Connect to the peer with this name at the first address that works. Raises LostError with all their errors."""
    whys = []
    for address, port in addresses:
        try:
            connection = socket.create_connection((address, port), timeout=DIAL_TIMEOUT)
            _tuned(connection)
            connection.settimeout(PEER_TIMEOUT)
            secured = secure.wrap_socket(connection)
        except OSError as error:
            whys.append(f"{address} port {port}: {explained(error)}")
            continue
        if _is(secured, name):
            return Link(secured, "downstream")
        whys.append(f"{address} port {port}: another machine answered")
        secured.close()
    raise LostError("downstream", "; ".join(whys) or "it has no address")


class _Duplex(io.RawIOBase):
    """A TLS connection that one thread reads and another one writes.

    OpenSSL supports one call at a time: the session tickets after a handshake are read while the first message is
    written, and connections hung if both happened concurrently. So calls do not block, and a lock serializes them.
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
    """Messages to and from a neighbour. A separate thread sends them, and combines small ones."""

    def __init__(self, connection: ssl.SSLSocket, where: str) -> None:
        self._connection, self.where = _Duplex(connection), where
        self._input = io.BufferedReader(self._connection, 1 << 18)
        self._output: queue.Queue[tuple[int, bytes] | None] = queue.Queue(_QUEUED)
        self._error: Exception | None = None
        self.sent = 0  # bytes of messages
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()

    def send(self, kind: int, data: bytes = b"") -> None:
        """Raises LostError, possibly for an earlier message."""
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
        """Wait until all messages have been sent, unless the connection is lost."""
        if self._error is None:
            self._output.put(None)
            self._sender.join(PEER_TIMEOUT)

    def receive(self, *kinds: int) -> tuple[int, bytes]:
        """Return the next message, of one of these kinds. Raises LostError; RefusedError for other kinds."""
        try:
            kind, size = _HEAD.unpack(self._exactly(_HEAD.size))
            if kind not in kinds or size > LONGEST:
                raise RefusedError(f"the {self.where} node sent an unexpected message: kind {kind}, {size} bytes")
            return kind, self._exactly(size)
        except (OSError, ValueError) as error:
            raise LostError(self.where, error) from error

    def _exactly(self, size: int) -> bytes:
        data: bytes | None = self._input.read(size)
        if data is None or len(data) < size:
            raise LostError(self.where, self._error or "the connection was closed")
        return data
