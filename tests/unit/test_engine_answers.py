"""Responses of an engine, over real sockets: complete, truncated, malformed, endless."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import EngineFailed, EngineUnavailable, ImageUnfit, LauncherError
from launcher.model.limits import AnswerLimits
from launcher.node.docker.channel import EngineConnection, dial_local
from launcher.node.docker.client import Dial, DockerClient, checked
from launcher.node.docker.images import DockerImages

OK = b"HTTP/1.1 200 OK\r\n"
PONG = OK + b"Api-Version: 1.41\r\nContent-Length: 2\r\n\r\nOK"


def saying(data: bytes) -> Dial:
    """An engine that sends this in response to every request after the ping."""
    dialled: list[socket.socket] = []

    def dial() -> EngineConnection:
        ours, theirs = socket.socketpair()
        dialled.append(ours)
        answers = [PONG, data] if len(dialled) == 1 else [data]

        def speak() -> None:
            with theirs, contextlib.suppress(OSError):  # the client does not read all of it
                for answer in answers:
                    if not theirs.recv(1 << 16):
                        return
                    theirs.sendall(answer)

        threading.Thread(target=speak, daemon=True).start()
        return EngineConnection(ours, lambda: None, ours.close)

    return dial


def answered(data: bytes) -> bytes:
    client = DockerClient("a", "me", saying(data))
    try:
        return client.ask("ask", lambda api: checked(api.get(f"{api.base_url}/x", timeout=5)).content)
    finally:
        client.close()


@pytest.mark.parametrize(
    ("data", "content"),
    [
        (OK + b"Content-Length: 2\r\n\r\nhi", b"hi"),
        (OK + b"Content-Length: 0\r\n\r\n", b""),
        (OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n", b"hi!"),
        (OK + b"\r\nhi there", b"hi there"),  # it ends with the connection
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\n{}", b"{}"),
    ],
)
def test_answers(data: bytes, content: bytes) -> None:
    assert answered(data) == content


@pytest.mark.parametrize(
    "data",
    [b"", OK + b"Content-Length: 5\r\n\r\nhi", OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"[:-3]],
)
def test_a_truncated_response_is_a_lost_connection(data: bytes) -> None:
    with pytest.raises(EngineUnavailable, match=r"a: .*connection to its container engine broke"):
        answered(data)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        OK + b"X: " + b"x" * (1 << 19),
        OK + b"X: x\r\n" * 200,
    ],
)
def test_an_invalid_response_is_reported_as_unexpected(data: bytes) -> None:
    with pytest.raises(EngineFailed, match=r"a: .*unexpected response from the Docker API"):
        answered(data)


@given(st.binary(max_size=60))
@settings(max_examples=60, deadline=None)
def test_any_bytes_are_handled(data: bytes) -> None:
    for whole in (data, OK + data, OK + b"Transfer-Encoding: chunked\r\n\r\n" + data):
        with contextlib.suppress(LauncherError):
            answered(whole)


def endless(pause: float, theirs: socket.socket) -> None:
    with theirs, contextlib.suppress(OSError):
        if b"/_ping" in theirs.recv(1 << 16):
            theirs.sendall(PONG)
            theirs.recv(1 << 16)
        theirs.sendall(OK + b'Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n{"id": "\r\n')
        while True:
            theirs.sendall(b"1\r\nx\r\n" if pause else b"10000\r\n" + b"x" * (1 << 16) + b"\r\n")
            time.sleep(pause)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Dial]:
    """An engine on a local socket that sends an endless response to every request after the ping."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine.sock")
    server = socket.create_server(f"{tmp_path}/engine.sock", family=socket.AF_UNIX)

    def serve(pause: float) -> Dial:
        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=endless, args=(pause, server.accept()[0]), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return lambda: dial_local("gpu-a")

    return serve


@pytest.mark.parametrize(("pause", "text"), [(0.0, "over 8 MiB"), (0.2, "did not respond")])
def test_an_endless_response_is_aborted(serve: Callable[[float], Dial], pause: float, text: str) -> None:
    """Too large, or slow and over the time limit; the user's settings can raise both limits."""
    client = DockerClient("gpu-a", "me", serve(pause), AnswerLimits(8 << 20, 1.0))
    began = time.monotonic()
    with pytest.raises((EngineFailed, EngineUnavailable), match=text):
        client.ask("list containers", lambda api: api.containers())
    assert time.monotonic() - began < 60
    client.close()


def test_a_transfer_has_no_time_limit_but_its_events_have_a_size_limit(serve: Callable[[float], Dial]) -> None:
    client = DockerClient("gpu-a", "me", serve(0.0), AnswerLimits(8 << 20, 1.0))
    client.ping()
    tracemalloc.start()
    try:
        with pytest.raises((EngineFailed, ImageUnfit), match="over 8 MiB"):
            DockerImages(client).pull("image")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    client.close()
