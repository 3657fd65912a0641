"""What a program wrote to its container's own layer: told from caches and the launcher's files, listed, read, named."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest

from launcher import container_scripts
from launcher.errors import EngineFailed, LauncherError
from launcher.model.limits import DEFAULT_LIMITS
from launcher.node.docker.channel import dial_local
from launcher.node.docker.engine import _OWN, DockerEngine
from launcher.node.docker.values import wrote_outside
from launcher.node.files import FileEntry
from launcher.node.machine import LocalMachine
from launcher.records.paths import RunPaths
from launcher.records.store import Record
from launcher.records.written import Written, left_outside, not_fetched, outside

PROGRAMS = [
    *("/tmp/ckpt/model.pth", "/root/ckpt/model.pth", "/home/me/a", "/.launcher/home/ckpt/model.pth", "/workspace/x"),
    *("/model.pth", "/data/.hidden", "/opt/app/out.csv", "/usr/src/app/model.pth", "/var/tmp/x", "/tmp/torch/x"),
]
OTHERS = [
    *("/.launcher/entry.sh", "/.launcher/secrets/KEY", "/.launcher/home/.entry.7", "/.launcher/home/.rank.0.9"),
    *("/.launcher/home/.flight_recorder/0", "/.launcher/home/quiet", "/.launcher/home/meeting.json", "/output"),
    *("/root/.cache/huggingface/x", "/.launcher/home/.cache/torch/x", "/opt/app/__pycache__/x.pyc", "/root/.nv/x"),
    *("/root/.triton/x", "/tmp/torchinductor_me/x", "/tmp/torchelastic_1/x", "/usr/lib/python3/dist-packages/x"),
    *("/opt/conda/lib/python3.12/site-packages/x", "/etc/hosts", "/var/lib/dpkg/status", "/usr/bin/x", "/data/a.bin"),
]


def test_caches_packages_mount_points_and_the_launchers_files_are_not_the_programs() -> None:
    mounts = {"/output", "/data/a.bin"}
    assert [path for path in PROGRAMS if not wrote_outside(path, mounts)] == []
    assert [path for path in OTHERS if wrote_outside(path, mounts)] == []
    assert sum(map(len, container_scripts.scripts().values())) < _OWN


class Stub(BaseHTTPRequestHandler):
    """An engine with one container, which has these files in its own layer. None: a folder."""

    protocol_version = "HTTP/1.1"
    files: ClassVar[dict[str, bytes | None]] = {}
    layer: ClassVar[int] = 0
    asked: ClassVar[list[str]] = []
    slow: ClassVar[threading.Event] = threading.Event()  # until then the changes are not answered
    mounted: ClassVar[bool] = True

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        what = url.path.rpartition("/")[2]
        self.asked.append(f"{self.command} {what}")
        path = parse_qs(url.query).get("path", [""])[0]
        stat, content = "", b"OK"
        if "/containers/gone/" in url.path or (what == "archive" and (path not in self.files or not self.mounted)):
            self._send(404, json.dumps({"message": "No such container"}).encode())
            return
        if what == "json":
            content = json.dumps({"SizeRw": self.layer, "Mounts": [{"Destination": "/output"}]}).encode()
        elif what == "changes":
            self.slow.wait(60)
            content = json.dumps([{"Path": path, "Kind": 1} for path in self.files]).encode()
        elif what == "archive":
            data = self.files[path]
            known = {"name": "x", "size": len(data or b""), "mode": 0o644 if data is not None else 1 << 31 | 0o755}
            stat = base64.b64encode(json.dumps({**known, "mtime": "2026-01-01T00:00:00.5Z"}).encode()).decode()
            content = _tar(path, data or b"")
        self._send(200, content, stat)

    do_HEAD = do_GET  # noqa: N815 - a name required by http.server

    def _send(self, status: int, content: bytes, stat: str = "") -> None:
        self.send_response(status)
        self.send_header("Api-Version", "1.41")
        self.send_header("Content-Length", str(len(content)))
        if stat:
            self.send_header("X-Docker-Container-Path-Stat", stat)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def _tar(path: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(path.rpartition("/")[2])
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerEngine]:
    class Unix(ThreadingHTTPServer):
        address_family = socket.AF_UNIX

        def server_bind(self) -> None:
            self.socket.bind(self.server_address)
            self.server_name, self.server_port = "engine", 0

        def get_request(self) -> tuple[socket.socket, str]:
            return self.socket.accept()[0], "caller"

    Stub.asked.clear()
    Stub.slow.set()
    monkeypatch.setattr(Stub, "layer", 30_000_000)
    monkeypatch.setattr(
        Stub,
        "files",
        {
            "/tmp": None,
            "/tmp/ckpt": None,
            "/tmp/ckpt/a model.pth": b"x" * 2_000_000,
            "/tmp/empty": None,
            "/root/.cache/hub": b"x" * 3_000_000,
            "/.launcher/entry.sh": b"x" * 1000,
            "/root/b": b"y" * 10,
        },
    )
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    path = str(tmp_path / "engine.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with Unix(path, Stub) as unix:  # type: ignore[arg-type]
        threading.Thread(target=unix.serve_forever, daemon=True).start()
        made = DockerEngine("a", "a", LocalMachine("a", "me", DEFAULT_LIMITS), lambda: dial_local("a"))
        yield made
        made.close()
        Stub.slow.set()
        unix.shutdown()


def test_files_of_the_program_are_listed_and_read(engine: DockerEngine) -> None:
    found = {file.path: file for file in engine.grown("x")}
    assert {path: file.size for path, file in found.items()} == {"/tmp/ckpt/a model.pth": 2_000_000, "/root/b": 10}
    assert found["/root/b"].mtime == 1767225600.5
    for path, file in found.items():
        assert b"".join(engine.read_grown("x", file)) == Stub.files[path]
    with pytest.raises(EngineFailed, match="it has changed"):
        list(engine.read_grown("x", FileEntry("/root/b", 11, 0.0)))


def test_a_container_that_has_grown_little_costs_one_request(
    engine: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stub, "layer", 1_200_000)
    assert list(engine.grown("x")) == []
    assert list(engine.grown("gone")) == []
    assert Stub.asked == ["GET _ping", "GET json", "GET json"]


def test_little_beside_caches_is_not_worth_a_word(engine: DockerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stub, "files", {"/root/.cache/hub": b"x" * 3_000_000, "/root/b": b"y" * 10})
    assert list(engine.grown("x")) == []


def test_what_cannot_be_listed_in_time_has_a_size(engine: DockerEngine) -> None:
    Stub.slow.clear()
    found = engine.grown("x", 0.05)
    assert found == (FileEntry("", 30_000_000, 0.0),)
    assert not_fetched(found) == "NOT FETCHED: 30 MB, files not listed"
    assert str(Written(0, 0, (), outside=outside(found))).startswith(
        "30 MB, outside the output folder: files not listed: it goes with the container, which is kept until launcher "
        "fetch --checkpoints has brought it; save below $LAUNCHER_OUTPUT"
    )


def test_files_that_an_engine_cannot_read_any_more_are_an_error(
    engine: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It mounts everything for that: the folders on the node may have been removed."""
    monkeypatch.setattr(Stub, "mounted", False)
    with pytest.raises(LauncherError, match="cannot read the 3 files that were written in x"):
        engine.grown("x")


def test_what_was_fetched_of_a_container_is_not_only_there(tmp_path: Path) -> None:
    record = Record(RunPaths(tmp_path / "job-20260101-000000-aaaa"))
    files = [FileEntry("/tmp/a", 3, 1e9), FileEntry("/tmp/b", 3, 1e9), FileEntry("", 7, 0.0)]
    copy = record.paths.root / "container" / "n" / "tmp" / "a"
    copy.parent.mkdir(parents=True)
    copy.write_text("abc")
    here, elsewhere = record.paths.root, tmp_path / "elsewhere"
    assert left_outside(files, "n", [here]) == files
    os.utime(copy, (1e9, 1e9))
    assert left_outside(files, "n", [elsewhere, here]) == files[1:]
    assert left_outside(files, "n", [elsewhere]) == files  # what `fetch` brings to another folder
    said = str(Written(0, 0, (), outside=outside(files[:2])))
    assert said.startswith("2 files, 6 B, outside the output folder: /tmp/a, /tmp/b: they go with the container, ")
