"""What the nodes of a job with min_nodes tell each other: their states (meeting.py) over TCP, each message signed.

Anyone may connect to a node's port. Until a connection has brought a message that a node of this run has signed, and
that is news, it is a stranger's: there are few of these at a time, and the oldest is closed for a new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.container_scripts import ends, meeting
else:
    import ends  # beside this file
    import meeting

STRANGERS = 16  # connections, and as many for each node
LONGEST = 8192  # bytes of a message, and as many for each node


class Wire:
    """Tells all other nodes this one's state whenever it changes, and every `beat` seconds; hears theirs."""

    def __init__(self, me: meeting.State, addresses: dict[str, str], beat: float, key: bytes) -> None:
        self._told, self._addresses, self._beat, self._key = me, addresses, beat, key
        self._heard: dict[str, meeting.Heard] = {}
        self._changed = threading.Condition()
        self._news = False  # something was heard since the last look, or it was woken
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        self._few = threading.Condition()
        self._most, self._longest = STRANGERS * (1 + len(addresses)), LONGEST * (1 + len(addresses))
        host, _, port = addresses[me.node].rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server(("", int(port)), family=family, backlog=len(addresses) + 8)
        threading.Thread(target=self._serve, daemon=True).start()
        for node in addresses:
            if node != me.node:
                threading.Thread(target=self._send, args=(node,), daemon=True).start()

    def tell(self, me: meeting.State) -> None:
        with self._changed:
            self._told = me
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def view(self, wait: float) -> dict[str, meeting.Heard]:
        """The last state of each node; returns early when one is heard, and when woken."""
        with self._changed:
            self._changed.wait_for(lambda: self._news, wait)
            self._news = False
            return dict(self._heard)

    def _send(self, node: str) -> None:
        host, _, port = self._addresses[node].rpartition(":")
        while True:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), self._beat * 4) as link:
                if hasattr(socket, "TCP_USER_TIMEOUT"):  # after a cut the kernel alone would wait longer each time
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._beat * 4000))
                last = None
                while True:
                    with self._changed:
                        while self._told is last:
                            self._changed.wait()
                        last = self._told
                    link.sendall(self._signed(last))
            time.sleep(self._beat)

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:  # no file descriptor is left, or the other side has gone
                time.sleep(self._beat)
                continue
            with self._few:
                self._strangers[link] = None
                if len(self._strangers) > self._most:
                    _close(next(iter(self._strangers)))
                self._few.wait_for(lambda: len(self._strangers) <= self._most, self._beat)
            try:
                threading.Thread(target=self._listen, args=(link,), daemon=True).start()
            except RuntimeError:  # no thread is left: nodes try again
                self._forget(link)
                link.close()

    def _forget(self, link: socket.socket) -> None:
        with self._few:
            self._strangers.pop(link, None)
            self._few.notify_all()

    def _listen(self, link: socket.socket) -> None:
        try:
            link.settimeout(self._beat * 20)
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError), link, link.makefile("rb") as lines:
                while line := lines.readline(self._longest):
                    if self._hear(self._checked(line)):
                        self._forget(link)
        finally:
            self._forget(link)

    def _hear(self, told: meeting.State) -> bool:
        """Whether it is news."""
        with self._changed:
            known = self._heard.get(told.node)
            news = known is None or meeting.newer(known.state, told)
            if news:
                self._heard[told.node] = meeting.Heard(told, time.monotonic())
                self._news = True
                self._changed.notify_all()
            return news

    def _signed(self, state: meeting.State) -> bytes:
        body = json.dumps(asdict(state)).encode()
        return hmac.new(self._key, body, hashlib.sha256).hexdigest().encode() + b" " + body + b"\n"

    def _checked(self, line: bytes) -> meeting.State:
        """Raises ValueError for what no node of this run has signed."""
        mark, _, body = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(mark, hmac.new(self._key, body, hashlib.sha256).hexdigest().encode()):
            raise ValueError("not signed with this run's key")
        told = json.loads(body)
        told.update(members=tuple(told["members"]), hears=tuple(told["hears"]), ends=ends.read(told["ends"]))
        state = meeting.State(**told)
        if state.node not in self._addresses:
            raise ValueError(state.node)
        return state


def _close(link: socket.socket) -> None:
    """Its thread ends then, and closes it."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
