"""Data of a URL from web servers that misbehave: the right bytes or an error, never both, and bounded memory."""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from launcher.api.until_started import until_started
from launcher.errors import DataFailed
from launcher.features.data import download as download_
from launcher.features.data import worker
from launcher.features.data.download import Variables, download
from launcher.features.data.job import bring_data
from launcher.features.data.locations import copies, parse_source
from launcher.job.loader import parse_job
from launcher.model.progress import no_progress
from launcher.node.connect import Fleet
from tests.features.data.test_push import HERE, target
from tests.features.data.test_url import cache, fetch, remote

import data_http as http  # isort: skip  (test_url has its folder in sys.path)

__all__ = ["cache"]
MIB = 1 << 20
SIZE = 9 * MIB + 17
BODY = random.Random(0).randbytes(SIZE)
TOKEN = "Bearer a-token-of-a-user"


class Server(BaseHTTPRequestHandler):
    """A server that sends exactly what is asked for. Those of the tests differ in one thing."""

    protocol_version = "HTTP/1.1"
    body = BODY
    etag = '"one"'
    asked: ClassVar[list[tuple[str, str, str]]]  # path, range, authorization

    def do_HEAD(self) -> None:
        self.send(200, {"Content-Length": str(len(self.body)), **self.of_file()})

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Range", ""), self.headers.get("Authorization", "")))
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found:
            self.part(int(found[1]), int(found[2]) + 1)
        else:
            self.send(200, self.of_file(), self.body)

    def part(self, start: int, end: int) -> None:
        """Send a range. The first byte is what a launcher asks for when it looks at the file."""
        self.send(206, {"Content-Range": f"bytes {start}-{end - 1}/{len(self.body)}"}, self.body[start:end])

    def of_file(self) -> dict[str, str]:
        return {"ETag": self.etag} if self.etag else {}

    def send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        every = {"Content-Length": str(len(body)), **(self.of_file() if status == 206 else {}), **headers}
        for name, value in every.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(kind: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of such a server, whose errors are its clients that went away."""
    if issubclass(kind, Server):
        kind.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        server.daemon_threads, server.handle_error = True, lambda *_: None  # type: ignore[method-assign]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def order(url: str, root: Path, **env: str) -> dict[str, Any]:
    about = {"source": url, "name": "", "image": ""}
    made = {"role": "fetch", "url": url, "root": str(root), "about": about, "most_files": 1000}
    return {**made, "env": env, "secrets": {}, "hidden": []}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "PAUSE", 0.01)
    for name in ("FSSPEC_HTTP", "FSSPEC_HTTPS"):
        monkeypatch.setenv(name, "")  # restores what a download sets


class Fetched:
    """A download in this process, and what it said."""

    done = total = received = 0

    def __init__(self, url: str, root: Path, **env: str) -> None:
        self.said: list[dict[str, Any]] = []
        root.mkdir(exist_ok=True)
        self.download = fetch.Download(order(url, root, **env), lambda **message: self.said.append(message))
        single = self.download.listed()["single"]
        self.bytes = (root / "copies" / self.download.run(self) / "files" / single).read_bytes()


def parts_of(change: Callable[[Server, int, int], None]) -> type[Server]:
    """A server that is changed in how it sends all but the first byte."""

    class Changed(Server):
        def part(self, start: int, end: int) -> None:
            if end - start > 1:
                change(self, start, end)
            else:
                super().part(start, end)

    return Changed


def named(start: int, end: int, size: int = SIZE) -> dict[str, str]:
    return {"Content-Range": f"bytes {start}-{end - 1}/{size}"}


def drip(server: Server, start: int, end: int) -> None:
    server.wfile.write(b"HTTP/1.1 206 Partial Content\r\n")
    for _ in range(200):
        server.wfile.write(b"X-A: b\r\n")
        time.sleep(0.05)


def endless(server: Server, start: int, end: int) -> None:
    server.send(206, {**named(start, end), "Content-Length": "", "Connection": "close"})
    while True:
        server.wfile.write(bytes(MIB))


def shorter(server: Server, start: int, end: int) -> None:
    server.send(206, {**named(start, end), "Content-Length": str(end - start)}, BODY[start : end - 1])
    server.close_connection = True


def redirected(server: Server, start: int, end: int) -> None:
    server.send(302, {"Location": server.path + "x"})


WRONG: dict[str, tuple[Callable[[Server, int, int], None], str]] = {
    "the beginning for any range": (lambda s, a, b: s.send(206, named(0, b - a), BODY[: b - a]), "sends the range"),
    "shifted by a byte": (lambda s, a, b: s.send(206, named(a + 1, b + 1), BODY[a + 1 : b + 1]), "sends the range"),
    "no Content-Range": (lambda s, a, b: s.send(206, {}, BODY[a:b]), "a range that it does not name"),
    "the whole file as a part": (lambda s, a, b: s.send(206, named(0, SIZE), BODY), "sends the range 'bytes 0-"),
    "the whole file": (lambda s, a, b: s.send(200, {}, BODY), "answers with the status 200"),
    "an unknown total": (
        lambda s, a, b: s.send(206, {"Content-Range": f"bytes {a}-{b - 1}/*"}, BODY[a:b]),
        "sends the range",
    ),
    "longer, as announced": (lambda s, a, b: s.send(206, named(a, b), BODY[a:b] + b"?"), r"bytes, it sends \d+"),
    "without an end": (endless, "bytes, it sends more"),
    "shorter than announced": (shorter, r"^the connection ended after \d+ of \d+ bytes; asked 5 times in \d+ s$"),
    "shorter, as announced": (lambda s, a, b: s.send(206, named(a, b), BODY[a : b - 1]), r"bytes, it sends \d+"),
    "compressed": (
        lambda s, a, b: s.send(206, {**named(a, b), "Content-Encoding": "gzip"}, gzip.compress(BODY[a:b], 1)),
        r"sends the file compressed \(gzip\)",
    ),
    "headers that never end": (drip, "no answer: TimeoutError: less than 16 KiB in 0 s; asked 2 times in "),
    "another length": (
        lambda s, a, b: s.send(206, named(a, b, SIZE + len(s.asked)), BODY[a:b]),
        "changed during the download",
    ),
    "416": (lambda s, a, b: s.send(416, {"Content-Range": f"bytes */{SIZE}"}), "416 Requested Range Not Satisfiable"),
    "another file": (lambda s, a, b: s.send(206, {**named(a, b), "ETag": '"two"'}, BODY[a:b]), "changed during"),
    "503": (lambda s, a, b: s.send(503, {}), r"503 Service Unavailable; asked 5 times in \d+ s"),
    "404": (lambda s, a, b: s.send(404, {}), "no such file or folder in the store"),
    "400": (lambda s, a, b: s.send(400, {}), "400 Bad Request"),
    "redirects without an end": (redirected, "it redirects more than 10 times"),
}


FIXES = {
    "shorter than announced": "try again: what has come is kept",
    "headers that never end": "try again: what has come is kept",
    "503": "try again later",
    "404": "check the URL; copies on nodes stay",
    "400": "check the URL",
    "redirects without an end": "check the URL: curl -LI",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    change, says = WRONG[name]
    if name == "headers that never end":
        monkeypatch.setattr(remote, "SILENCE", 0.4)
        monkeypatch.setattr(fetch, "TRIES", 2)
    with served(parts_of(change)) as url, pytest.raises(fetch.FetchError, match=says) as error:
        Fetched(f"{url}/x.tar", tmp_path)
    fix = FIXES.get(name, "try again" if "changed" in says else "download it yourself, and give its path")
    assert worker.failure("a", {"end": error.value.end, "why": str(error.value)}).next_step.startswith(fix)
    assert [*tmp_path.glob("copies/*")] == []
    assert ([*tmp_path.glob("partial/*")] != []) == (name == "the beginning for any range"), "which the first one is"


def test_memory_is_bounded_whatever_is_sent(tmp_path: Path) -> None:
    """A process of its own, as on a node: two bodies without an end, and one that is small while it is compressed."""

    class Bomb(Server):
        body = bytes(1 << 27)

        def part(self, start: int, end: int) -> None:
            packed = gzip.compress(self.body[: 1 << 20]) * 128
            self.send(206, {**named(start, end, len(self.body)), "Content-Encoding": "gzip"}, packed)

    class Endless(Server):
        def part(self, start: int, end: int) -> None:
            endless(self, start, end)

    for kind in (Bomb, Endless, parts_of(endless)):
        with served(kind) as url:
            process = worker.Worker("a", HERE.open(worker.local_argv()), order(f"{url}/x.tar", tmp_path))
            with closing(process):
                message: Mapping[str, Any] = {}
                while "end" not in message:
                    message = process.report(1.0) or {}
                    if "state" in message:
                        process.send({})
                    status = Path(f"/proc/{process._stream._process.pid}/status")  # type: ignore[attr-defined]  # noqa: SLF001
                    if peak := re.search(r"VmHWM:\s+(\d+) kB", status.read_text()):
                        assert int(peak[1]) < 200_000
                assert message["end"] == "wrong"


class NoRanges(SimpleHTTPRequestHandler):
    """Python's own server, which knows no ranges. cuts: connections that it will cut after half of the file."""

    cuts: ClassVar[list[int]] = []
    sent: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.sent.append(self.headers.get("Range", ""))
        body = BODY[: SIZE // 2] if self.cuts and not self.headers.get("Range") and self.cuts.pop() else BODY
        self.send_response(200)
        self.send_header("Content-Length", str(SIZE))
        self.send_header("Last-Modified", "Sat, 01 Aug 2026 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def test_a_server_without_ranges_sends_the_file_once(tmp_path: Path) -> None:
    NoRanges.sent.clear()
    with served(NoRanges) as url:
        found = Fetched(f"{url}/x.tar", tmp_path)
    assert (found.bytes == BODY, found.said, found.download.unchecked) == (True, [], 1)
    assert NoRanges.sent.count("") == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_bytes_count_as_they_arrive(tmp_path: Path, ranges: bool) -> None:
    """Of a piece of which a part has come, and once only if the rest has to be asked for again."""
    half, arrived, cuts = 150_000, threading.Event(), [1]

    class Slow(Server):
        body = BODY[: 2 * half]

        def do_GET(self) -> None:
            if not ranges:
                del self.headers["Range"]
            super().do_GET()

        def send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
            first = len(body) > 1 and self.asked and self.asked[-1][1] != "bytes=0-0" and cuts
            if not first:
                super().send(status, headers, body)
                return
            super().send(status, {**headers, "Content-Length": str(len(body))}, body[:half])
            if arrived.wait(60):
                cuts.clear()
            self.close_connection = True

    class Watched(Fetched):
        _done = 0

        @property
        def done(self) -> int:  # type: ignore[override]
            return self._done

        @done.setter
        def done(self, value: int) -> None:
            self._done = value
            if value == half:
                arrived.set()

    with served(Slow) as url:
        found = Watched(f"{url}/x.tar", tmp_path)
    assert (found.bytes == Slow.body, found.done, found.total) == (True, 2 * half, 2 * half)
    assert arrived.is_set()


@pytest.mark.parametrize(("sent", "length"), [("bytes */0", 0), ("", 0), ("", 5), ("bytes */5", 0)])
def test_an_empty_file_has_no_first_byte(tmp_path: Path, sent: str, length: int) -> None:
    """Some servers refuse that range without a word about the size."""

    class Empty(Server):
        def do_HEAD(self) -> None:
            self.send(200, {"Content-Length": str(length)})

        def part(self, start: int, end: int) -> None:
            self.send(416, {"Content-Range": sent})

    with served(Empty) as url:
        if sent == "bytes */5" or length:
            with pytest.raises(fetch.FetchError, match="416 "):
                Fetched(f"{url}/x.tar", tmp_path)
        else:
            assert Fetched(f"{url}/x.tar", tmp_path).bytes == b""


def test_after_a_cut_a_server_without_ranges_is_asked_from_the_beginning(tmp_path: Path) -> None:
    NoRanges.sent.clear()
    NoRanges.cuts[:] = [1, 1]
    with served(NoRanges) as url:
        found = Fetched(f"{url}/x.tar", tmp_path)
    assert (found.bytes == BODY, NoRanges.sent.count("")) == (True, 3)
    note = "x.tar: the server sends whole files only, so it is fetched from its beginning again"
    assert found.said == [{"note": note}] * 2


def test_the_user_is_told_of_a_new_beginning_and_of_a_missing_checksum(tmp_path: Path, cache: Path) -> None:
    NoRanges.cuts[:] = [1]
    messages: list[str] = []
    with served(NoRanges) as url:
        source = parse_source(f"{url}/x.tar", Path())
        _, done = download(source, [target(tmp_path, "a")], Variables(), messages.append, no_progress)
    assert done.unchecked == 1
    assert messages == ["a: x.tar: the server sends whole files only, so it is fetched from its beginning again"]


def checked_by(headers: Mapping[str, str], *, of_head: bool = True) -> type[Server]:
    class Checked(Server):
        def of_file(self) -> dict[str, str]:
            found = {name: value for name, value in headers.items() if self.command == "HEAD" or not of_head}
            return {**super().of_file(), **found}

    return Checked


def encoded(kind: str, body: bytes = BODY) -> str:
    return base64.b64encode(hashlib.new(kind, body).digest()).decode()


CHECKSUMS = {
    "Content-MD5": (checked_by({"Content-MD5": encoded("md5")}), "md5"),
    "sha256": (checked_by({"x-amz-checksum-sha256": encoded("sha256")}), "sha256"),
    "sha1": (checked_by({"x-amz-checksum-sha1": encoded("sha1")}), "sha1"),
    "crc32": (
        checked_by(
            {"x-amz-checksum-crc32": base64.b64encode(__import__("zlib").crc32(BODY).to_bytes(4, "big")).decode()}
        ),
        "crc32",
    ),
    "ETag of S3": (
        checked_by({"ETag": f'"{hashlib.md5(BODY).hexdigest()}"', "x-amz-request-id": "1"}, of_head=False),
        "md5",
    ),
    "X-Linked-ETag": (checked_by({"X-Linked-ETag": f'"{hashlib.sha256(BODY).hexdigest()}"'}, of_head=False), "sha256"),
}


@pytest.mark.parametrize("name", CHECKSUMS)
def test_the_checksum_that_a_server_offers_is_compared(tmp_path: Path, name: str) -> None:
    """Of one that sends other bytes than it says, with the right range, nothing else tells it."""
    kind, called = CHECKSUMS[name]

    class Shifted(kind):  # type: ignore[valid-type, misc]
        def part(self, start: int, end: int) -> None:
            self.send(206, named(start, end), (BODY + b"?")[start + 1 : end + 1])

    with served(kind) as url:
        found = Fetched(f"{url}/x.tar", tmp_path / "right")
    assert (found.bytes == BODY, found.download.unchecked) == (True, 0)
    with (
        served(Shifted) as url,
        pytest.raises(fetch.FetchError, match=f"differs from its {called} in the store") as error,
    ):
        Fetched(f"{url}/x.tar", tmp_path / "wrong")
    assert error.value.end in worker.FIXES
    assert [*(tmp_path / "wrong").glob("*/*")] == [], "what is discarded is gone"


@pytest.mark.parametrize(
    "kind",
    [
        Server,
        checked_by({"x-amz-checksum-sha256": encoded("sha256", b"") + "-2"}),
        checked_by({"Content-MD5": encoded("md5", b""), "Content-Length": "5"}),
        checked_by({"ETag": f'"{"0" * 32}"'}, of_head=False),
        checked_by(
            {"ETag": f'"{"0" * 32}"', "x-amz-request-id": "1", "x-amz-server-side-encryption": "aws:kms"}, of_head=False
        ),
    ],
)
def test_what_is_no_checksum_of_the_file_is_not_compared(tmp_path: Path, kind: type[Server]) -> None:
    with served(kind) as url:
        found = Fetched(f"{url}/x.tar", tmp_path)
    assert (found.bytes == BODY, found.download.unchecked) == (True, 1)


def test_credentials_go_to_the_servers_own_address_alone(tmp_path: Path) -> None:
    """Not to a server that it redirects to, even if that redirects back; and no server can name another protocol."""

    class Other(Server):
        pass

    with served(Other) as other:

        class Own(Server):
            def do_GET(self) -> None:
                if self.path.startswith("/file"):
                    self.send(302, {"Location": "file:///etc/passwd"})
                elif self.path.startswith("/away"):
                    self.asked.append((self.path, "", self.headers.get("Authorization", "")))
                    self.send(302, {"Location": f"{other}/x.tar"})
                else:
                    super().do_GET()

            def do_HEAD(self) -> None:
                self.do_GET()

        given = {"FSSPEC_HTTP": json.dumps({"headers": {"authorization": TOKEN}, "cookies": {"a": "b"}})}
        with served(Own) as url:
            assert Fetched(f"{url}/x.tar", tmp_path / "1", **given).bytes == BODY
            assert {asked[2] for asked in Own.asked} == {TOKEN}
            assert Fetched(f"{url}/away/x.tar", tmp_path / "2", **given).bytes == BODY
            assert {asked[2] for asked in Other.asked} == {""}
            assert (Own.asked[-1][0], Own.asked[-1][2]) == ("/away/x.tar", TOKEN)
            with pytest.raises(fetch.FetchError, match=r"redirects to file://, which is no web server"):
                Fetched(f"{url}/file/x.tar", tmp_path / "3", **given)


@pytest.mark.parametrize("value", ["[", "[1]", '{"proxy": "x"}', '{"headers": 5}', '{"client_kwargs": {"auth": "x"}}'])
def test_options_without_an_effect_are_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(fetch.FetchError, match="FSSPEC_HTTP or FSSPEC_HTTPS cannot be used"):
        Fetched("http://127.0.0.1:1/x", tmp_path, FSSPEC_HTTPS=value)


def test_a_proxy_is_used_with_its_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Proxy(Server):
        def do_GET(self) -> None:
            self.headers["Authorization"] = self.headers["Proxy-Authorization"]
            super().do_GET()

    with served(Proxy) as url:
        monkeypatch.setenv("http_proxy", url.replace("://", "://me:a%20b@"))
        assert Fetched("http://store.example.org/a%20b/x.tar?v=1", tmp_path / "1").bytes == BODY
        login = f"Basic {base64.b64encode(b'me:a b').decode()}"
        assert {(path, login_) for path, _, login_ in Proxy.asked} == {
            ("http://store.example.org/a%20b/x.tar?v=1", login)
        }
        Proxy.asked.clear()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with pytest.raises(fetch.FetchError, match="no answer: ConnectionRefusedError"):
            Fetched("http://127.0.0.1:1/x", tmp_path / "2")
        assert Proxy.asked == []


@pytest.mark.parametrize("size", [10**15, 1 << 59, 10**19])
def test_a_size_without_room_is_said_before_anything_is_made(tmp_path: Path, size: int) -> None:
    class Huge(Server):
        def part(self, start: int, end: int) -> None:
            self.send(206, {"Content-Range": f"bytes {start}-{end - 1}/{size}"}, b"?" * (end - start))

    with served(Huge) as url:
        source, node = parse_source(f"{url}/x.tar", Path()), target(tmp_path, "a")
        with pytest.raises(DataFailed, match=r"(?s)are needed.*free some space"):
            download(source, [node], Variables(), print, no_progress)
        assert copies(node.engine, node.root) == []
        assert [asked[1] for asked in Huge.asked] == ["bytes=0-0"]


def test_without_the_store_a_whole_copy_is_named_and_can_be_used(tmp_path: Path, cache: Path) -> None:
    a, b = target(tmp_path, "a"), target(tmp_path, "b")
    with served(Server) as url:
        source = parse_source(f"{url}/a%20b.tar", Path())
        found, _ = download(source, [b], Variables(), print, no_progress)
    with pytest.raises(DataFailed) as error:
        download(source, [a, b], Variables(), print, no_progress)
    assert error.value.next_step.endswith(f"; or give the whole copy of b instead of the URL: b:{found.path}")
    assert Path(found.path).read_bytes() == BODY
    with pytest.raises(DataFailed) as error:
        download(source, [a], Variables(), print, no_progress)
    assert "instead of the URL" not in str(error.value)


def test_a_silent_server_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    said = threading.Event()

    class Silent(Server):
        def part(self, start: int, end: int) -> None:
            said.wait(60)
            super().part(start, end)

    def log(text: str) -> None:
        assert text == "a: the store has not answered yet"
        said.set()

    monkeypatch.setattr(download_, "PATIENCE", 0.0)
    with served(Silent) as url:
        download(parse_source(f"{url}/x.tar", Path()), [target(tmp_path, "a")], Variables(), log, no_progress)
    assert said.is_set()


def test_a_ctrl_c_during_the_download_of_a_job_says_what_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it comes with the first line about the download, of a node that does not reach the server."""
    monkeypatch.setenv("HOME", str(tmp_path))
    root, url = tmp_path / ".launcher" / "data", "http://127.0.0.1:1/x.tar"
    root.mkdir(parents=True)
    (root / "first.sh").write_text("""echo '{"end": "unreachable", "why": "no way out"}'; cat >/dev/null""")
    job = f"name: x\nimage: {{ref: y}}\nnodes: [a]\nrun: {{module: train}}\ndata: {{pets: {{from: '{url}', at: /d}}}}\n"
    node = target(tmp_path, "a")
    fleet = Fleet([node.engine], {}, None)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped, until_started():
        bring_data(parse_job(job, "job.yaml"), fleet, [node.facts], interrupt, no_progress, tmp_path)
    assert str(stopped.value) == (
        "nothing was started; what has come of data pets stays, and the next up goes on with it\n"
        f"  -> to remove it: launcher data rm {url} --nodes a"
    )


def test_connections_are_kept_and_opened_again(tmp_path: Path) -> None:
    """The server closes each after some requests, without a word."""
    ports = set()

    class Closing(Server):
        def part(self, start: int, end: int) -> None:
            ports.add(self.client_address[1])
            super().part(start, end)
            self.close_connection = len(ports) < 3

    with served(Closing) as url:
        web, file = http.Web(http.Options({}, {}, True)), f"{url}/x.tar"
        found = web.look(file)
        read = partial(web.read, found)
        assert b"".join(b"".join(read(n * MIB, (n + 1) * MIB)) for n in range(9)) == BODY[: 9 * MIB]
    assert len(ports) == 3


def test_the_scripts_of_a_node_call_no_parametrized_type() -> None:
    """`dict[str, str]()` is an error in Python 3.8, which images may have."""
    for path in worker._SCRIPTS.glob("*.py"):  # noqa: SLF001
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        found = [call.lineno for call in calls if isinstance(call.func, ast.Subscript)]
        named = [
            line
            for line in found
            if re.search(r"\b(dict|list|set|tuple|deque)\[.*\]\(", path.read_text().splitlines()[line - 1])
        ]
        assert named == [], path.name
