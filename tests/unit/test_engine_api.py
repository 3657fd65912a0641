"""Requests to an engine over real sockets: keep-alive, shared, lost and late connections."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from launcher.errors import EngineFailed, EngineUnavailable
from launcher.node.docker.channel import EngineConnection, dial_local
from launcher.node.docker.client import CONNECTIONS, Dial, DockerClient, checked, found
from launcher.node.docker.images import DockerImages
from launcher.node.parallel import run_all


class Engine(BaseHTTPRequestHandler):
    """Echoes requests; some paths select a special behaviour."""

    protocol_version = "HTTP/1.1"
    version: ClassVar[str] = "1.41"
    connections: ClassVar[list[object]] = []
    asked: ClassVar[list[str]] = []
    gone: ClassVar[threading.Event] = threading.Event()
    held: ClassVar[threading.Event] = threading.Event()  # until then "/held" is not answered
    together: ClassVar[threading.Barrier] = threading.Barrier(CONNECTIONS)  # so many times "/together" is answered

    def setup(self) -> None:
        super().setup()
        self.connections.append(self)

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append(self.path)
        status, content = 200, json.dumps([self.command, self.path, body.decode()]).encode()
        if self.path == "/none":
            status, content = 404, json.dumps({"message": "No such container: x"}).encode()
        elif self.path == "/proxy":
            status, content = 502, b"<h1>Bad Gateway</h1>"
        elif self.path == "/together":
            self.together.wait(60)
        elif self.path == "/held":
            self.held.wait(60)
        elif self.path == "/cut" or (self.path == "/cut-once" and self.asked.count(self.path) == 1):
            self.close_connection = True
            return
        elif self.path == "/last":
            self.close_connection = True
        elif self.path.endswith("/get"):
            self._endless()
            return
        self.send_response(302 if self.path == "/elsewhere" else status)
        self.send_header("Api-Version", type(self).version)
        self.send_header("Content-Length", str(len(content)))
        if self.path == "/elsewhere":
            self.send_header("Location", "https://elsewhere.test/here")
        if self.path == "/goodbye":
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def _endless(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        except OSError:
            self.close_connection = True
            self.gone.set()

    do_GET = do_POST = do_PUT = do_DELETE = _answer  # noqa: N815 - names required by http.server

    def log_message(self, *_: object) -> None:
        pass


def wait_until_asked(path: str, times: int) -> None:
    deadline = time.monotonic() + 60
    while Engine.asked.count(path) < times:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert Engine.asked.count(path) == times


@pytest.fixture
def dial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dial]:
    class Unix(ThreadingHTTPServer):
        address_family = socket.AF_UNIX

        def server_bind(self) -> None:
            self.socket.bind(self.server_address)
            self.server_name, self.server_port = "engine", 0

        def get_request(self) -> tuple[socket.socket, str]:
            return self.socket.accept()[0], "caller"

    for seen in (Engine.connections, Engine.asked):
        seen.clear()
    Engine.gone.clear()
    Engine.held.clear()
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    path = str(tmp_path / "engine.sock")
    with Unix(path, Engine) as unix:  # type: ignore[arg-type]
        threading.Thread(target=unix.serve_forever, daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        yield lambda: dial_local("a")
        unix.shutdown()


@pytest.fixture
def client(dial: Dial) -> Iterator[DockerClient]:
    made = DockerClient("a", "me", dial)
    yield made
    made.close()


def get(client: DockerClient, path: str, timeout: float = 60) -> Any:
    return client.ask(f"get {path}", lambda api: checked(api.get(f"{api.base_url}{path}", timeout=timeout)).json())


def test_requests_and_responses(client: DockerClient) -> None:
    made = client.ask("create", lambda api: api.create_container_from_config({"Image": "i"}, "x"))
    assert made == ["POST", "/v1.41/containers/create?name=x", '{"Image": "i"}']
    listed = client.ask("list", lambda api: api.containers(all=True, filters={"label": ["a=b c"]}))
    assert "filters=%7B%22label%22%3A+%5B%22a%3Db+c%22%5D%7D" in listed[1]
    client.ask("put", lambda api: api.put_archive("x", "/", b"tar"))
    client.ask("remove", lambda api: api.remove_container("x"))
    assert len(Engine.connections) == 1


@pytest.mark.parametrize("version", ["1.41", "1.52"])
def test_the_api_version_is_requested_once_and_used(
    client: DockerClient, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "version", version)
    for _ in range(2):
        assert client.ask("inspect", lambda api: api.inspect_container("x"))[1] == f"/v{version}/containers/x/json"
    assert Engine.asked.count("/_ping") == 1


@pytest.mark.parametrize("version", ["", "1.41/../..", "one"])
def test_an_invalid_version_is_refused(client: DockerClient, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "version", version)
    with pytest.raises(EngineFailed, match=r"a: .*unexpected response from the Docker API"):
        client.ping()


def test_proxies_are_ignored_and_redirects_stay_on_the_engine(
    client: DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert get(client, "/info")[1] == "/info"
    assert get(client, "/elsewhere")[1] == "/here"  # on the same engine
    assert len(Engine.connections) == 1


@pytest.mark.parametrize("settings_", ["[]", '{"auths": {"x": 3}}'])
def test_invalid_docker_settings_are_reported(client: DockerClient, tmp_path: Path, settings_: str) -> None:
    (tmp_path / "config.json").write_text(settings_)
    with pytest.raises(EngineFailed, match=r"config\.json"):
        client.ping()


def test_many_concurrent_requests_share_few_connections(client: DockerClient) -> None:
    answers = run_all([lambda n=n: get(client, f"/{n}") for n in range(40)])
    assert [answer[1] for answer in answers] == [f"/{n}" for n in range(40)]
    assert len(Engine.connections) <= CONNECTIONS


def test_a_list_inspects_concurrently_and_omits_removed_containers(client: DockerClient) -> None:
    assert len(found(lambda path: get(client, path), ["/together"] * CONNECTIONS)) == CONNECTIONS
    assert found(lambda name: None if name == "b" else name, ["a", "b", *"c" * 9]) == ["a", *"c" * 9]
    assert found(str, []) == []


def test_waiting_for_a_connection_has_a_time_limit(client: DockerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.ping()
    monkeypatch.setattr("launcher.node.docker.client._POOL_TIMEOUT", 0.1)
    threads = [threading.Thread(target=get, args=(client, "/held")) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    wait_until_asked("/held", CONNECTIONS)
    with pytest.raises(EngineUnavailable, match=r"a: .*did not respond"):
        get(client, "/info")
    Engine.held.set()
    for thread in threads:
        thread.join()
    assert get(client, "/info")[1] == "/info"


@pytest.mark.parametrize(("path", "text"), [("/none", "No such container: x"), ("/proxy", "Bad Gateway")])
def test_an_error_response_has_its_message_and_keeps_the_connection(client: DockerClient, path: str, text: str) -> None:
    for _ in range(3):
        with pytest.raises(EngineFailed, match=text):
            get(client, path)
    assert len(Engine.connections) == 1


@pytest.mark.parametrize("path", ["/goodbye", "/last"])
def test_a_connection_closed_by_the_engine_is_not_reused(client: DockerClient, path: str) -> None:
    for _ in range(2):
        assert get(client, path)[1] == path
        time.sleep(0.05)
    assert len(Engine.connections) == 2
    assert Engine.asked.count(path) == 2


def test_a_request_on_a_dead_connection_is_retried_once(client: DockerClient) -> None:
    assert get(client, "/cut-once")[1] == "/cut-once"
    with pytest.raises(EngineUnavailable, match="broke"):
        get(client, "/cut")
    assert Engine.asked.count("/cut") == 2


def test_a_late_response_closes_its_connection(client: DockerClient) -> None:
    with pytest.raises(EngineUnavailable, match="did not respond"):
        get(client, "/held", timeout=0.1)
    wait_until_asked("/held", 1)
    Engine.held.set()
    assert get(client, "/info")[1] == "/info"  # and not the late response


def test_an_abandoned_save_closes_its_connection(client: DockerClient) -> None:
    images = DockerImages(client)
    for _ in range(CONNECTIONS + 1):
        Engine.gone.clear()
        pieces = images.save("big")
        assert next(pieces).startswith(b"x")
        pieces.close()  # type: ignore[attr-defined]
        assert Engine.gone.wait(5)
    assert get(client, "/info")[1] == "/info"


def test_a_connection_with_a_high_descriptor_number(dial: Dial) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = 1500  # select() supports none above 1023
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, number + 1), hard))

    def high() -> EngineConnection:
        with socket.socket(socket.AF_UNIX) as low:
            low.connect(os.environ["DOCKER_HOST"].removeprefix("unix://"))
            stream = socket.socket(fileno=os.dup2(low.fileno(), number))
        return EngineConnection(stream, lambda: None, stream.close)

    client = DockerClient("a", "me", high)
    try:
        for _ in range(3):
            assert get(client, "/info")[1] == "/info"
        assert len(Engine.connections) == 1
    finally:
        client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
