"""One HTTP/1.1 exchange with an engine: the request as bytes, the answer read by httptools (the parser of Node.js)."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import NamedTuple, Protocol

import httptools

_PIECE = 1 << 16
_LONGEST_HEAD = 1 << 18  # bytes: no answer of an engine in its senses begins with more
_ENDS = (b"content-length", b"transfer-encoding")  # an answer with neither ends with its connection


class Wire(Protocol):
    """A connection to an engine, as much of a socket as an exchange needs."""

    @property
    def idle(self) -> bool:
        """Still open with nothing unread: fit for another request."""

    def sendall(self, data: bytes, /) -> None: ...

    def recv(self, size: int, /) -> bytes: ...

    def settimeout(self, seconds: float | None, /) -> None: ...

    def close(self) -> None: ...


class Answer(NamedTuple):
    """What came back."""

    status: int
    reason: str
    content: bytes
    keeps: bool  # the connection may be used again


def request(method: str, target: str, body: bytes | None, kind: str) -> bytes:
    """`target`: path and query, quoted. `kind`: the body's media type."""
    head = f"{method} {target} HTTP/1.1\r\nHost: docker\r\n"
    if body is not None:
        head += f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    elif method != "GET":
        head += "Content-Length: 0\r\n"
    return f"{head}\r\n".encode("ascii") + (body or b"")


def read_answer(receive: Callable[[int], bytes]) -> Answer:
    """The next answer on a connection.

    Raises ConnectionResetError where the connection ended before the answer did, ValueError for what is no HTTP, and
    what `receive` raises.
    """
    reader = _Reader()
    parser = reader.parser = httptools.HttpResponseParser(reader)
    seen = 0
    while not reader.complete:
        piece = receive(_PIECE)
        if not piece:
            if reader.headed and reader.endless:
                break
            raise ConnectionResetError("it ended before its answer did")
        try:
            parser.feed_data(piece)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ValueError(f"no HTTP ({error}): {piece[:60]!r}") from error
        seen += len(piece)
        if not reader.headed and seen > _LONGEST_HEAD:
            raise ValueError(f"no end of its headers in {_LONGEST_HEAD} bytes")
    return Answer(reader.status, reader.reason, b"".join(reader.pieces), reader.keeps)


class _Reader:
    """What httptools calls, in this order; once more from the start after a "100 Continue"."""

    parser: httptools.HttpResponseParser

    def __init__(self) -> None:
        self.complete = self.keeps = False
        self.on_message_begin()

    def on_message_begin(self) -> None:
        if self.complete:  # a second answer: nobody asked for it, and what comes next is anybody's guess
            raise ValueError("more than one answer")
        self.status = 0
        self.reason = ""
        self.pieces: list[bytes] = []
        self.headed = False
        self.endless = True

    def on_status(self, words: bytes) -> None:
        self.reason += words.decode("latin-1")

    def on_header(self, name: bytes, _: bytes) -> None:
        if name.lower() in _ENDS:
            self.endless = False

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()
        self.headed = self.status >= HTTPStatus.OK

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def on_message_complete(self) -> None:
        self.complete = self.headed
        self.keeps = self.parser.should_keep_alive()
