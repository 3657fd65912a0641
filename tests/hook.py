"""A server in this process that answers every request with given bytes, valid HTTP or not."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

GARBAGE = b"hello\r\n\r\n"


@dataclass
class Hook:
    """address: without a path. asked: set once a request has come. drips: a byte of it every second, and no end."""

    address: str
    answer: bytes
    drips: bool
    asked: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def serve(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                threading.Thread(target=self._answer, args=(listening.accept()[0],), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # its client may leave
            connection.recv(1 << 16)
            self.asked.set()
            if not self.drips:
                connection.sendall(self.answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):  # otherwise unread bytes would reset the connection
                    pass
            while self.drips and not self.over.wait(1.0):
                connection.sendall(self.answer[:1])


@contextlib.contextmanager
def hook(answer: bytes, *, drips: bool = False) -> Iterator[Hook]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        served = Hook(f"http://127.0.0.1:{listening.getsockname()[1]}", answer, drips)
        threading.Thread(target=served.serve, args=(listening,), daemon=True).start()
        yield served
        served.over.set()
