"""The Docker Engine API, for what is small and asked of every node: requests on connections that are kept alive.

docker-py carries what is big and rare (bulk.py). Of hundreds of nodes, and before every start, its import (0.1 s) and
the two libraries below it (a millisecond of processor time a request) are most of what the launcher would do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode

from launcher.node.docker.exchange import Wire, read_answer, request

CONNECTIONS = 5  # of a node's 8 channels; the rest is for commands and sftp
API_TIMEOUT = 60.0  # seconds without a byte from the engine
_POOL_TIMEOUT = 120.0  # seconds until one of the connections is free

Query = Mapping[str, object]


class Refused(Exception):  # noqa: N818 - inside launcher.node.docker only
    """The engine will not: the status of its answer and its words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(status, words)
        self.status = status
        self.words = words


class Missing(Refused):
    """There is no such thing."""


class Api:
    """Requests to one engine. Safe for several threads.

    `dial` makes a connection; what it raises is raised. Every method raises Refused, OSError (TimeoutError after
    `timeout` seconds without a byte), and ValueError for what is no HTTP, or no JSON where that was expected. Paths
    are those of the API without a version: the engine's own.
    """

    def __init__(self, dial: Callable[[], Wire]) -> None:
        self._dial = dial
        self._idle: list[Wire] = []
        self._free = threading.Semaphore(CONNECTIONS)
        self._lock = threading.Lock()

    def get(self, path: str, query: Query | None = None) -> Any:
        return json.loads(self.read(path, query))

    def read(self, path: str, query: Query | None = None) -> bytes:
        return self._ask("GET", path, query)

    def post(self, path: str, query: Query | None = None, body: object = None, timeout: float = API_TIMEOUT) -> bytes:
        """The answer as it is. body: sent as JSON."""
        sent = None if body is None else json.dumps(body).encode()
        return self._ask("POST", path, query, sent, "application/json", timeout)

    def put(self, path: str, query: Query, archive: bytes) -> None:
        self._ask("PUT", path, query, archive, "application/x-tar")

    def delete(self, path: str, query: Query | None = None) -> None:
        self._ask("DELETE", path, query)

    def close(self) -> None:
        """Those that are idle; one in use ends with its request."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(
        self,
        method: str,
        path: str,
        query: Query | None,
        body: bytes | None = None,
        kind: str = "",
        timeout: float = API_TIMEOUT,
    ) -> bytes:
        target = f"{path}?{urlencode(query)}" if query else path
        if not self._free.acquire(timeout=_POOL_TIMEOUT):
            raise TimeoutError(f"all {CONNECTIONS} connections were in use for {_POOL_TIMEOUT:g} s")
        try:
            wire = self._take()
            try:
                wire.settimeout(timeout)
                wire.sendall(request(method, target, body, kind))
                answer = read_answer(wire.recv)
            except BaseException as error:
                wire.close()
                if not isinstance(error, TimeoutError):
                    self.close()  # the others have no more behind them
                raise
            if answer.keeps:
                with self._lock:
                    self._idle.append(wire)
            else:
                wire.close()
        finally:
            self._free.release()
        if answer.status >= HTTPStatus.BAD_REQUEST:
            refusal = Missing if answer.status == HTTPStatus.NOT_FOUND else Refused
            raise refusal(answer.status, _words(answer.content) or answer.reason)
        return answer.content

    def _take(self) -> Wire:
        while True:
            with self._lock:
                wire = self._idle.pop() if self._idle else None
            if wire is None:
                return self._dial()
            if wire.idle:
                return wire
            wire.close()


def segment(name: str) -> str:
    """A name or an id as one piece of a path, whatever is in it."""
    return quote(name, safe="")


def image_path(reference: str) -> str:
    return f"/images/{quote(reference, safe='/:@')}"


def unframed(log: bytes) -> bytes:
    """A container's log: the frames of its two streams taken off; as it is where it has none (a terminal's)."""
    pieces, at = [], 0
    while at < len(log):
        if log[at] > 2 or log[at + 1 : at + 4] != b"\0\0\0":
            return log
        size = int.from_bytes(log[at + 4 : at + 8], "big")
        pieces.append(log[at + 8 : at + 8 + size])
        at += 8 + size
    return b"".join(pieces)


def _words(content: bytes) -> str:
    """Of an answer that says no."""
    try:
        answer = json.loads(content)
    except ValueError:
        return content.decode(errors="replace").strip()
    return str(answer["message"] if isinstance(answer, dict) and "message" in answer else answer)
