"""Messages between the nodes of a job with min_nodes: their states (meeting.py) over TCP, each message signed.

Anyone can connect to a node's port. A connection is unauthenticated until it delivers a new message signed by a node of
this run. The number of unauthenticated connections is limited: a new one closes the oldest.
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
    from launcher.elastic.container_scripts import ends, meeting
else:
    import ends  # in the same folder
    import meeting

STRANGERS = 16  # unauthenticated connections, and as many more per node
LONGEST = 8192  # bytes of a message, and as many more per node


class Wire:
    """Sends this node's state to all other nodes whenever it changes, and receives theirs."""

    def __init__(self, me: meeting.State, addresses: dict[str, str], beat: float, key: bytes) -> None:
        self._state, self._addresses, self._beat, self._key = me, addresses, beat, key
        self._heard: dict[str, meeting.Heard] = {}
        self._changed = threading.Condition()
        self._news = False  # a state was received since the last view(), or wake() was called
        self._strangers: dict[socket.socket, None] = {}  # oldest first
        self._strangers_changed = threading.Condition()
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
            self._state = me
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._news = True
            self._changed.notify_all()

    def view(self, wait: float) -> dict[str, meeting.Heard]:
        """Return the last state of each node, after `wait` seconds or when one is received or wake() is called."""
        with self._changed:
            self._changed.wait_for(lambda: self._news, wait)
            self._news = False
            return dict(self._heard)

    def _send(self, node: str) -> None:
        host, _, port = self._addresses[node].rpartition(":")
        while True:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), self._beat * 4) as link:
                if hasattr(socket, "TCP_USER_TIMEOUT"):  # the kernel's retry intervals grow
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._beat * 4000))
                last = None
                while True:
                    with self._changed:
                        while self._state is last:
                            self._changed.wait()
                        last = self._state
                    link.sendall(self._signed(last))
            time.sleep(self._beat)

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:  # out of file descriptors, or the peer closed the connection
                time.sleep(self._beat)
                continue
            with self._strangers_changed:
                self._strangers[link] = None
                if len(self._strangers) > self._most:
                    _close(next(iter(self._strangers)))
                self._strangers_changed.wait_for(lambda: len(self._strangers) <= self._most, self._beat)
            try:
                threading.Thread(target=self._listen, args=(link,), daemon=True).start()
            except RuntimeError:  # out of threads: nodes try again
                self._forget(link)
                link.close()

    def _forget(self, link: socket.socket) -> None:
        with self._strangers_changed:
            self._strangers.pop(link, None)
            self._strangers_changed.notify_all()

    def _listen(self, link: socket.socket) -> None:
        try:
            link.settimeout(self._beat * 20)
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError), link, link.makefile("rb") as lines:
                while line := lines.readline(self._longest):
                    if self._hear(self._checked(line)):
                        self._forget(link)
        finally:
            self._forget(link)

    def _hear(self, received: meeting.State) -> bool:
        """Store a state; return whether it is new."""
        with self._changed:
            known = self._heard.get(received.node)
            news = known is None or meeting.newer(known.state, received)
            if news:
                self._heard[received.node] = meeting.Heard(received, time.monotonic())
                self._news = True
                self._changed.notify_all()
            return news

    def _signed(self, state: meeting.State) -> bytes:
        body = json.dumps(asdict(state)).encode()
        return hmac.new(self._key, body, hashlib.sha256).hexdigest().encode() + b" " + body + b"\n"

    def _checked(self, line: bytes) -> meeting.State:
        """Return the state in a message. Raises ValueError if no node of this run signed it."""
        mark, _, body = line.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(mark, hmac.new(self._key, body, hashlib.sha256).hexdigest().encode()):
            raise ValueError("not signed with this run's key")
        fields = json.loads(body)
        fields.update(members=tuple(fields["members"]), hears=tuple(fields["hears"]), ends=ends.read(fields["ends"]))
        state = meeting.State(**fields)
        if state.node not in self._addresses:
            raise ValueError(state.node)
        return state


def _close(link: socket.socket) -> None:
    """Shut the connection down; its thread then closes it."""
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
