"""Requests to an engine over real sockets: kept alive, shared, cut, late; and the way to this machine's own."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.node.docker.api import CONNECTIONS, Api, Missing, Refused, segment, unframed
from launcher.node.docker.dialstdio import DialFailed
from launcher.node.docker.wire import SocketWire, dial
from launcher.node.parallel import run_all


class Engine(BaseHTTPRequestHandler):
    """Tells what it was asked, and does as the path says."""

    protocol_version = "HTTP/1.1"
    connections: ClassVar[list[object]] = []

    def setup(self) -> None:
        super().setup()
        self.connections.append(self)

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, words = 200, json.dumps([self.command, self.path, body.decode()]).encode()
        if self.path == "/none":
            status, words = 404, json.dumps({"message": "No such container: x"}).encode()
        elif self.path == "/proxy":
            status, words = 502, b"<h1>Bad Gateway</h1>"
        elif self.path == "/slow":
            time.sleep(0.5)
        elif self.path == "/cut":
            self.close_connection = True
            return
        elif self.path == "/last":
            self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Length", str(len(words)))
        if self.path == "/goodbye":
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(words)

    do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815 - so http.server wants them

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[[], SocketWire]]:
    class Unix(ThreadingHTTPServer):
        address_family = socket.AF_UNIX

        def server_bind(self) -> None:
            self.socket.bind(self.server_address)
            self.server_name, self.server_port = "engine", 0

        def get_request(self) -> tuple[socket.socket, str]:
            return self.socket.accept()[0], "caller"

    Engine.connections.clear()
    path = str(tmp_path / "engine.sock")
    with Unix(path, Engine) as unix:  # type: ignore[arg-type]
        threading.Thread(target=unix.serve_forever, daemon=True).start()
        yield lambda: dial({"DOCKER_HOST": f"unix://{path}"})
        unix.shutdown()


def test_what_is_sent_and_what_comes_back(server: Callable[[], SocketWire]) -> None:
    api = Api(server)
    assert api.get("/info", {"all": "1", "filters": '{"a": ["b c"]}'}) == [
        "GET",
        "/info?all=1&filters=%7B%22a%22%3A+%5B%22b+c%22%5D%7D",
        "",
    ]
    assert json.loads(api.post("/containers/create", {"name": "x"}, {"Image": "i"}))[2] == '{"Image": "i"}'
    api.put("/containers/x/archive", {"path": "/"}, b"tar")
    api.delete("/containers/x")
    assert len(Engine.connections) == 1
    api.close()


def test_many_at_once_share_few_connections(server: Callable[[], SocketWire]) -> None:
    api = Api(server)
    answers = run_all([lambda n=n: api.get(f"/{n}") for n in range(40)])
    assert [answer[1] for answer in answers] == [f"/{n}" for n in range(40)]
    assert len(Engine.connections) <= CONNECTIONS
    api.close()


@pytest.mark.parametrize(
    ("path", "status", "words"), [("/none", 404, "No such container: x"), ("/proxy", 502, "Bad Gateway")]
)
def test_a_refusal_has_its_words_and_costs_no_connection(
    server: Callable[[], SocketWire], path: str, status: int, words: str
) -> None:
    api = Api(server)
    for _ in range(3):
        with pytest.raises(Refused) as refused:
            api.get(path)
        assert refused.value.status == status
        assert isinstance(refused.value, Missing) == (status == 404)
        assert words in refused.value.words
    assert len(Engine.connections) == 1
    api.close()


@pytest.mark.parametrize("path", ["/goodbye", "/last"])
def test_a_connection_that_the_engine_has_closed_is_not_used_again(server: Callable[[], SocketWire], path: str) -> None:
    api = Api(server)
    for _ in range(2):
        assert api.get(path)[1] == path
        time.sleep(0.05)
    assert len(Engine.connections) == 2
    api.close()


def test_a_cut_and_a_late_answer_end_the_connection_only(server: Callable[[], SocketWire]) -> None:
    api = Api(server)
    with pytest.raises(ConnectionError):
        api.get("/cut")
    with pytest.raises(TimeoutError):
        api.post("/slow", timeout=0.1)
    assert api.get("/info")[1] == "/info"  # and not the late answer
    api.close()


def test_a_connection_beside_a_thousand_others() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = 1500  # select() knows none above 1023
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number + 1), hard))
    ours, theirs = socket.socketpair()
    try:
        wire = SocketWire(socket.socket(fileno=os.dup2(ours.fileno(), number)))
        assert wire.idle
        theirs.close()
        assert not wire.idle
        wire.close()
    finally:
        ours.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_name_is_one_piece_of_a_path() -> None:
    assert segment("../../x?y#z") == "..%2F..%2Fx%3Fy%23z"


frames = st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=20)), max_size=5)


@given(frames)
def test_a_log_without_its_frames(frames: list[tuple[int, bytes]]) -> None:
    framed = b"".join(bytes([stream, 0, 0, 0]) + len(text).to_bytes(4, "big") + text for stream, text in frames)
    assert unframed(framed) == b"".join(text for _, text in frames)


@given(st.binary(max_size=40))
def test_a_log_of_anything(log: bytes) -> None:
    assert len(unframed(log)) <= len(log)


def test_no_engine_here(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        dial({"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})


@pytest.fixture
def docker_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What `docker` does on this machine, as a shell script."""

    def be(script: str) -> None:
        path = tmp_path / "bin" / "docker"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(path.parent), prepend=":")

    return be


@pytest.mark.parametrize("how", ["DOCKER_CONTEXT", "settings", "DOCKER_HOST"])
def test_another_context_is_dockers_own_business(how: str, tmp_path: Path, docker_here: Callable[[str], None]) -> None:
    docker_here(
        '[ "$*" = "system dial-stdio" ] || exit 9\n'
        "while read -r line && [ ${#line} -gt 1 ]; do :; done\n"
        "printf 'HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n[]'; read -r rest"
    )
    environment = {"DOCKER_CONFIG": str(tmp_path)}
    if how == "settings":
        (tmp_path / "config.json").write_text('{"currentContext": "desktop"}')
    else:
        environment[how] = "tcp://10.1.2.3:2376" if how == "DOCKER_HOST" else "desktop"
    api = Api(lambda: dial(environment))
    assert api.get("/containers/json") == []
    api.close()


def test_what_docker_here_says_against_it(docker_here: Callable[[str], None]) -> None:
    docker_here("echo permission denied >&2; exit 1")
    with pytest.raises(DialFailed) as failed:
        Api(lambda: dial({"DOCKER_CONTEXT": "other"})).get("/info")
    assert (failed.value.code, failed.value.words) == (1, "permission denied")


def test_no_docker_command_for_a_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DialFailed) as failed:
        dial({"DOCKER_CONTEXT": "other"})
    assert failed.value.code == 127


@pytest.mark.parametrize("settings", ["{}", "no json", "[]", '{"currentContext": "default"}', None])
def test_no_context_is_the_usual_socket(settings: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if settings is not None:
        (tmp_path / "config.json").write_text(settings)
    monkeypatch.setattr("launcher.node.docker.wire._SOCKET", str(tmp_path / "usual.sock"))
    with pytest.raises(FileNotFoundError):
        dial({"DOCKER_CONFIG": str(tmp_path)})
