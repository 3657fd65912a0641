"""Answers of an engine, in pieces of any size: whole, torn, strange."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.node.docker.exchange import Answer, read_answer, request

OK = b"HTTP/1.1 200 OK\r\n"
PIECE = st.integers(1, 100)


def receiver(data: bytes, piece: int) -> Callable[[int], bytes]:
    stream = io.BytesIO(data)
    return lambda size: stream.read(min(size, piece))


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (OK + b"Content-Length: 2\r\n\r\nhi", Answer(200, "OK", b"hi", True)),
        (OK + b"Content-Length: 0\r\n\r\n", Answer(200, "OK", b"", True)),
        (OK + b"Content-Length: 2\r\nConnection: close\r\n\r\nhi", Answer(200, "OK", b"hi", False)),
        (OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n", Answer(200, "OK", b"hi!", True)),
        (OK + b"\r\nhi there", Answer(200, "OK", b"hi there", False)),  # its end is the connection's
        (b"HTTP/1.0 404 Not Found\r\n\r\nno", Answer(404, "Not Found", b"no", False)),
        (b"HTTP/1.1 204 No Content\r\n\r\n", Answer(204, "No Content", b"", True)),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", Answer(304, "Not Modified", b"", True)),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}",
            Answer(201, "Created", b"{}", True),
        ),
    ],
)
@given(piece=PIECE)
def test_answers(data: bytes, answer: Answer, piece: int) -> None:
    assert read_answer(receiver(data, piece)) == answer


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 2",
        OK,
        OK + b"Content-Length: 5\r\n\r\nhi",
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
)
@given(piece=PIECE)
def test_one_that_is_torn_is_a_lost_connection(data: bytes, piece: int) -> None:
    with pytest.raises(ConnectionResetError):
        read_answer(receiver(data, piece))


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\nhi",
        OK + b"Content-Length: -1\r\n\r\nhi",
        OK + b"Content-Length: 0\r\n\r\n" + OK + b"Content-Length: 0\r\n\r\n",  # an answer to nothing
        OK + b"X: " + b"x" * (1 << 19),
    ],
)
def test_what_is_no_answer_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"no HTTP|headers"):
        read_answer(receiver(data, 1 << 16))


@given(st.binary(), PIECE)
def test_no_bytes_break_it(data: bytes, piece: int) -> None:
    for whole in (data, OK + data, OK + b"Transfer-Encoding: chunked\r\n\r\n" + data):
        try:
            read_answer(receiver(whole, piece))
        except (ConnectionResetError, ValueError):
            continue


def test_requests() -> None:
    assert request("GET", "/info", None, "") == b"GET /info HTTP/1.1\r\nHost: docker\r\n\r\n"
    assert request("POST", "/x/start", None, "").endswith(b"\r\nContent-Length: 0\r\n\r\n")
    sent = request("PUT", "/x/archive?path=%2F", b"tar", "application/x-tar")
    assert sent.endswith(b"\r\nContent-Type: application/x-tar\r\nContent-Length: 3\r\n\r\ntar")
