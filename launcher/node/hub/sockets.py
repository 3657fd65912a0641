"""Sockets of the hub: nothing that is done with one stops its thread."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading

from launcher.node.hub.loop import HUB, READ, WRITE, Waiter

TICK = 0.5  # seconds after which a reader to whom nothing came looks up: for its limits, a sign of life


class HubSocket:
    """A connected socket, read by one greenlet, sent to by anybody.

    Nobody waits to send: what the kernel does not take at once is kept and follows. So a peer that reads nothing holds
    up no other. ssh's own windows bound how much is kept.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Takes it over: closed by somebody else, its number could be another's before the hub has forgotten it."""
        kind = connected.family, connected.type, connected.proto
        self._socket = socket.socket(*kind, fileno=connected.detach())
        self._socket.setblocking(False)
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._closed = False
        self._reader: Waiter | None = None
        self._watched = 0
        self._ticks = False

    def send(self, data: bytes, /) -> int:
        """Takes all of it. Raises OSError."""
        with self._lock:
            if self._closed:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            if self._unsent or HUB.inside:
                if not self._unsent:
                    HUB.last(self._flush)  # with what else is sent by then: one system call, one packet
                self._unsent += data
                return len(data)
            taken = 0
            with contextlib.suppress(BlockingIOError):
                taken = self._socket.send(data)
            if taken < len(data):
                self._unsent += data[taken:]
                HUB.soon(self._watch)
        return len(data)

    def recv(self, size: int, /) -> bytes:
        """In a greenlet. b"" when it is closed, here or there. Raises TimeoutError after a TICK of silence, OSError."""
        if self._closed:
            return b""
        if not self._ticks:
            self._ticks = True
            HUB.later(TICK, self._tick)
        self._reader = Waiter(HUB)
        self._watch()
        ready = self._reader.wait()
        self._reader = None
        if self._closed:
            return b""
        if ready:
            with contextlib.suppress(BlockingIOError):
                return self._socket.recv(size)
        raise TimeoutError

    def settimeout(self, timeout: float | None, /) -> None:
        """It is TICK, whatever is asked for."""

    def close(self) -> None:
        """Its reader wakes and finds the end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(OSError):  # not connected any more, or it takes no more
                if self._unsent:
                    self._socket.send(self._unsent)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        HUB.soon(self._close)

    def _close(self) -> None:
        HUB.watch(self._socket, 0, self._ready)
        self._socket.close()
        if self._reader:
            self._reader.wake_now()

    def _tick(self) -> None:
        self._ticks = False
        if self._reader:
            self._reader.give_up()

    def _watch(self) -> None:
        wanted = (READ if self._reader else 0) | (WRITE if self._unsent else 0)
        if wanted & ~self._watched and not self._closed:
            self._watched |= wanted
            HUB.watch(self._socket, self._watched, self._ready)

    def _unwatch(self, events: int) -> None:
        if not self._closed:
            self._watched &= ~events
            HUB.watch(self._socket, self._watched, self._ready)

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ and self._reader:
            self._reader.wake_now()
        elif events & READ:  # it is busy elsewhere, and asks again
            self._unwatch(READ)

    def _flush(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:
                self._unsent.clear()  # the reader learns of it
        if self._unsent:
            self._watch()
        elif self._watched & WRITE:
            self._unwatch(WRITE)


def connect(fresh: socket.socket, address: tuple[object, ...], timeout: float) -> None:
    """Within so many seconds. Raises TimeoutError, OSError."""
    if not HUB.inside:
        fresh.settimeout(timeout)
        fresh.connect(address)
        return
    fresh.setblocking(False)
    code = fresh.connect_ex(address)
    if code == errno.EINPROGRESS:
        waiter = Waiter(HUB)
        HUB.watch(fresh, WRITE, lambda _: waiter.wake_now())
        connected = waiter.wait(timeout)
        HUB.watch(fresh, 0, lambda _: None)
        if not connected:
            raise TimeoutError("timed out")
        code = fresh.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))  # becomes ConnectionRefusedError and the like
