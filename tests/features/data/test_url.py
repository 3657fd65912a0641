"""Data of a URL, from a server that speaks S3 and HTTP: downloaded once, resumed, verified, refused with its reason."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import random
import re
import shlex
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from launcher.errors import DataFailed, LauncherError, UsageError
from launcher.features.data import container_scripts, worker
from launcher.features.data.download import Downloaded, Variables, download, here
from launcher.features.data.locations import DataSource, copies, parse_source
from launcher.features.data.push import Endpoint, Sender, push, verify
from launcher.job.fields import parse_data
from launcher.job.files import hidden
from launcher.job.problems import LocatedError
from launcher.model.container import TOOL
from launcher.model.progress import no_progress
from launcher.node.machine import LocalMachine
from tests.bed import faults
from tests.e2e.cli import Cli
from tests.e2e.scene import Scene
from tests.features.data.test_push import HERE, target
from tests.s3 import BUCKET, Answer, Store, refused, s3

sys.path.insert(0, str(Path(container_scripts.__file__).parent))  # as its modules find one another on a node
import data_fetch as fetch
import data_remote as remote

MIB = 1 << 20
SIZE = 9 * MIB + 17
FILE = f"s3://{BUCKET}/pets/images.tar"
FOLDER = f"s3://{BUCKET}/pets/"
SECRET = "a-secret-access-key-of-a-user"
WITHOUT_PACKAGES = f'shift; exec {shlex.quote(sys.executable)} -S "$@"'
WITHOUT_WAY_OUT = 'http_proxy=http://127.0.0.1:1 exec "$@"'


@pytest.fixture
def store() -> Iterator[Store]:
    with s3() as made:
        yield made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return tmp_path / "cache" / "launcher" / "data"


def put(store: Store, name: str, seed: int = 0, size: int = SIZE) -> bytes:
    body = random.Random(seed).randbytes(size)
    store.client().put_object(Bucket=BUCKET, Key=name, Body=body, ACL="public-read")
    return body


def variables(store: Store) -> Variables:
    return Variables(store.variables, {"AWS_SECRET_ACCESS_KEY": SECRET})


def downloaded(url: str, store: Store, *nodes: Endpoint) -> tuple[DataSource, Downloaded, list[str]]:
    messages: list[str] = []
    source, done = download(parse_source(url, Path()), nodes, variables(store), messages.append, no_progress)
    return source, done, messages


def order(url: str, store: Store, root: Path, most_files: int = 1000, **secrets: str) -> dict[str, Any]:
    about = {"source": url, "name": "", "image": ""}
    made = {"role": "fetch", "url": url, "root": str(root), "about": about, "most_files": most_files}
    return {**made, "env": store.variables, "secrets": secrets, "hidden": [*secrets.values()]}


def test_a_file_is_downloaded_once_and_only_again_after_it_was_changed(store: Store, tmp_path: Path) -> None:
    body, node = put(store, "pets/images.tar"), target(tmp_path, "a")
    source, done, _ = downloaded(FILE, store, node)
    assert (source.host, Path(source.path).name, Path(source.path).read_bytes()) == ("a", "images.tar", body)
    assert done == Downloaded("a", SIZE, SIZE)
    assert store.sent == SIZE
    again, done, messages = downloaded(FILE, store, node)
    assert (again, done, messages, store.sent) == (source, Downloaded(), [], SIZE)
    changed = put(store, "pets/images.tar", 1)
    new, done, messages = downloaded(FILE, store, node)
    assert (Path(new.path).read_bytes(), done.received) == (changed, SIZE)
    assert messages == [f"{FILE} was changed after a got it: downloading it again"]
    for copy in copies(node.engine, node.root):
        assert (copy.source, copy.whole, verify(node, copy.name)) == (FILE, True, [])


def test_a_prefix_is_a_folder(store: Store, tmp_path: Path) -> None:
    bodies = {name: put(store, f"pets/{name}", size=size) for name, size in (("a/b/c", 5), ("a/d", 0), ("e", 5 * MIB))}
    store.client().put_object(Bucket=BUCKET, Key="pets/a/", Body=b"")  # stands for a folder
    source, done, _ = downloaded(FOLDER, store, target(tmp_path, "a"))
    found = Path(source.path)
    assert {str(path.relative_to(found)): path.read_bytes() for path in found.rglob("*") if path.is_file()} == bodies
    assert done.size == 5 * MIB + 5


def test_web_servers(store: Store, tmp_path: Path) -> None:
    body = put(store, "pets/images.tar")
    source, done, _ = downloaded(f"{store.url}/{BUCKET}/pets/images.tar?version=1", store, target(tmp_path, "a"))
    assert (Path(source.path).name, Path(source.path).read_bytes()) == ("images.tar", body)
    assert done.received == SIZE


@pytest.mark.ci
def test_a_download_that_is_killed_at_any_moment_goes_on(store: Store, tmp_path: Path) -> None:
    """Ten moments. What is fetched twice is at most what was requested at that moment."""
    size = 48 * MIB
    body = put(store, "pets/images.tar", size=size)
    for moment in range(10):
        store.sent, root = 0, tmp_path / str(moment)
        first = worker.Worker("a", HERE.open(worker.local_argv()), order(FILE, store, root))
        first.until("state")
        first.send({})
        while store.sent < size * moment // 10 or not store.sent:
            first.report(0.001)
        first._stream._process.kill()  # type: ignore[attr-defined]  # noqa: SLF001
        first.close()
        with closing(worker.Worker("a", HERE.open(worker.local_argv()), order(FILE, store, root))) as second:
            second.until("state")
            second.send({})
            content = second.until("content")
        assert (root / "copies" / content / "files" / "images.tar").read_bytes() == body
        print(f"killed at {moment} of 10: {(store.sent - size) / MIB:.1f} MiB twice")
        assert store.sent - size <= fetch.RANGE * fetch.REQUESTS


def test_the_other_nodes_are_tried_and_this_machine_if_none_reaches_it(
    store: Store, tmp_path: Path, cache: Path
) -> None:
    put(store, "pets/images.tar")
    url = f"{store.url}/{BUCKET}/pets/images.tar"
    cut_off = [target(tmp_path, name, WITHOUT_WAY_OUT) for name in "ab"]
    source, done, messages = downloaded(url, store, cut_off[0], target(tmp_path, "c"))
    assert (source.host, done.by) == ("c", "c")
    assert messages[0].startswith(f"a does not reach {url} (no answer: ConnectionRefusedError")
    source, done, messages = downloaded(url, store, *cut_off)
    assert (source.host, done.by) == ("", "this machine")
    assert messages[1].startswith(f"this machine downloads {url}, as no node reaches it: ")
    assert Path(source.path).is_relative_to(cache)


def test_without_the_package_in_the_image_this_machine_downloads_it(store: Store, tmp_path: Path, cache: Path) -> None:
    """Nodes that have it then get it from there, and no download is needed for them."""
    body = put(store, "pets/images.tar")
    nodes = [target(tmp_path, name, WITHOUT_PACKAGES) for name in "ab"]
    source, done, messages = downloaded(FILE, store, *nodes)
    what = f"{FILE}, as the image on a cannot: s3:// needs s3fs: No module named 'fsspec'"
    assert (done.by, messages) == ("this machine", [f"this machine downloads {what}"])
    origin = Sender(source, LocalMachine("this machine", "me"), source.path, "images.tar", None)
    delivered = push(origin, nodes, messages.append, no_progress)
    assert (delivered.failed, delivered.content, store.sent) == ({}, source.content, SIZE)
    for node in nodes:
        (copy,) = copies(node.engine, node.root)
        assert (copy.source, copy.signature) == (FILE, source.state)
        assert (Path(node.root) / copy.folder / "files" / "images.tar").read_bytes() == body
    elsewhere, done, _ = downloaded(FILE, store, target(tmp_path, "c"), nodes[1])
    assert (elsewhere.host, done, store.sent) == ("b", Downloaded(), SIZE)


def test_a_copy_that_was_changed_is_not_copied_on(store: Store, tmp_path: Path) -> None:
    put(store, "pets/images.tar")
    source, _, _ = downloaded(FILE, store, target(tmp_path, "a", WITHOUT_PACKAGES))
    with Path(source.path).open("r+b") as file:
        file.write(b"?")
    origin = Sender(source, LocalMachine("this machine", "me"), source.path, "images.tar", None)
    with pytest.raises(DataFailed, match=r"images\.tar was modified without a change of its size or mtime"):
        push(origin, [target(tmp_path, "b")], print, no_progress)
    with Path(source.path).open("ab") as file:
        file.write(b"?")
    with pytest.raises(DataFailed, match="was changed; to repair it: launcher data verify"):
        push(origin, [target(tmp_path, "c")], print, no_progress)


def test_only_damaged_pieces_of_a_copy_are_fetched_again(store: Store, tmp_path: Path) -> None:
    body, node = put(store, "pets/images.tar"), target(tmp_path, "a")
    source, _, _ = downloaded(FILE, store, node)
    with Path(source.path).open("r+b") as file:
        file.seek(5 * MIB)
        file.write(b"??")
    assert verify(node, source.content) == ["images.tar"]
    repaired, done, _ = downloaded(FILE, store, node)
    assert (repaired, done.received, Path(source.path).read_bytes()) == (source, MIB, body)


def test_secrets_are_the_downloads_alone(store: Store, tmp_path: Path) -> None:
    """Neither in its command line or first environment, nor in its files, nor in what it says."""
    put(store, "pets/images.tar")
    store.fault = lambda _, path: refused("403 Forbidden", f"Key {SECRET} is unknown") if path.count("/") > 1 else None
    process = worker.Worker("a", HERE.open(worker.local_argv()), order(FILE, store, tmp_path, KEY=SECRET))
    seen = Path(f"/proc/{process._stream._process.pid}")  # type: ignore[attr-defined]  # noqa: SLF001
    assert SECRET.encode() not in (seen / "cmdline").read_bytes() + (seen / "environ").read_bytes()
    with closing(process), pytest.raises(DataFailed) as error:
        process.until("state")
    assert SECRET not in str(error.value)
    assert SECRET not in repr(variables(store))
    assert subprocess.run(["grep", "-r", SECRET, tmp_path], check=False).returncode == 1


TOKEN = "a-token-of-a-user"


@pytest.mark.parametrize("secret", [True, False])
def test_parts_of_the_variables_of_fsspec_are_in_no_message(tmp_path: Path, secret: bool) -> None:
    """The server says what it was sent: where its answer is wrong, and where the launcher cuts a long message."""
    given = {"FSSPEC_HTTP": json.dumps({"headers": {"Authorization": f"Bearer {TOKEN}", "X-Key": "other-key"}})}
    said: list[str] = []

    class Echo(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent = f"{self.headers['Authorization']} {self.headers['X-Key']}"
            if "long" in self.path:
                self.send_response(403, "x" * 182 + sent)
            else:
                self.send_response(206)
                self.send_header("Content-Range", sent)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        for name in ("x", "long"):
            url = f"http://127.0.0.1:{server.server_port}/{name}"
            variables = Variables(*(({}, given) if secret else (given, {})))
            with pytest.raises(DataFailed) as error:
                download(parse_source(url, Path()), [target(tmp_path, name)], variables, said.append, no_progress)
            said.append(str(error.value))
        server.shutdown()
    assert len(said) == 2
    assert not any(part in text for text in said for part in (TOKEN, TOKEN[:10], "other-key"))


def test_parts_of_the_variables_of_fsspec_are_masked_in_a_run() -> None:
    headers = {"headers": {"Authorization": f"Bearer {TOKEN}", "X": ["y", {"z": "another-part"}]}, "anon": True}
    given = {
        "FSSPEC_HTTPS": json.dumps(headers),
        "FSSPEC_S3_ENDPOINT_URL": "https://minio.example.org",
        "A": "a-b-c-d-e",
    }
    assert {TOKEN, f"Bearer {TOKEN}", "another-part", given["FSSPEC_HTTPS"]} == {*hidden({}, given)}
    assert {*hidden(given, {})} == {*hidden({}, given), *given.values()}
    assert hidden({"FSSPEC_HTTPS": "{not json"}, {}) == ["{not json", "{not json"]


FORBIDDEN = refused("403 Forbidden", "InvalidAccessKeyId")


def test_wrong_credentials_are_said_with_where_they_come_from(store: Store, tmp_path: Path) -> None:
    """And nothing is tried on another machine, or kept."""
    put(store, "pets/images.tar")
    store.fault = lambda _method, _path: FORBIDDEN
    node = target(tmp_path, "a")
    for url in (FILE, FOLDER, f"{store.url}/{BUCKET}/pets/images.tar"):
        with pytest.raises(DataFailed, match=r"(?s)^a: .*: the store refuses: 403 .*`secrets` of the job") as error:
            downloaded(url, store, node, target(tmp_path, f"b{len(url)}"))
        assert url in str(error.value)
    assert copies(node.engine, node.root) == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (f"s3://{BUCKET}/nothing", "no such file or folder in the store"),
        ("s3://no-bucket/nothing", "no such file or folder in the store"),
        ("foo://place/name", "this machine: foo://place/name: foo:// needs fsspec and its package for such a store"),
        ("http://127.0.0.1:1/x", "this machine: http://127.0.0.1:1/x: no answer"),
        ("{web}/bucket/", "HTTP has no list of a folder: give the URL of a file"),
        ("{web}/bucket/nothing", "no such file or folder in the store"),
    ],
)
def test_what_cannot_be_downloaded_is_said(store: Store, tmp_path: Path, url: str, says: str) -> None:
    with pytest.raises(LauncherError) as error:
        downloaded(url.format(web=store.url), store, target(tmp_path, "a"))
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://me:password@host/x", "a URL with credentials would be in records"),
        ("https://token@host/x", "a URL with credentials would be in records"),
        ("https://host/x?a=1&X-Amz-Signature=abc", "a URL with credentials would be in records"),
        *(
            (f"https://host/x?a=1&{name}=abc", "a URL with credentials would be in records")
            for name in (
                *(
                    "password",
                    "private_token",
                    "api_key",
                    "X-Amz-Security-Token",
                    "X-Amz-Credential",
                    "key",
                    "client-secret",
                ),
                *("%70assword", "api%5Fkey", "API_KEY", "accessToken", "AWSAccessKeyId", "sig", "pass+word"),
            )
        ),
        ("https://host/x?a=1;token=abc", "a URL with credentials would be in records"),
        ("s3://key%3Asecret@bucket/x", "a URL with credentials would be in records"),
        (f"https://host/{'x' * 8000}", "expected a URL of at most 8,000 characters, not 8,013"),
        ("https://host/a\nb", "expected (KIND://PLACE/NAME|host:/path, a URL)"),
        ("file:///data/x", "file:// is no store"),
        ("s3:///x", "names no server or bucket"),
        ("https://host/a#b", "a # is not part of a file's URL: write %23 if"),
        ("s3://bucket/a#b", "a # is not part of a file's URL: a name with # cannot be given"),
        ("zip://a::s3://b/c", "expected KIND://PLACE/NAME"),
    ],
)
def test_refused_urls(url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_source(url, Path())
    with pytest.raises(LocatedError, match=says):  # in a job
        parse_data({"pets": {"from": url, "at": "/data"}})


@pytest.mark.parametrize(
    "url", ["https://host/x?version=1&tokenizer=b&part=key", "https://host/token/key=1", "abfs://container@account/x"]
)
def test_accepted_urls(url: str) -> None:
    assert parse_source(url, Path()).url == url


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((FILE, "--env", "NOT_SET"), "NOT_SET is not set in your environment"),
        ((FILE, "--rehash"), "has no effect"),
        (("a:/x", "--env", "HOME"), "is for the download of a URL"),
    ],
)
def test_options_of_push(cli: Cli, argv: tuple[str, ...], says: str) -> None:
    assert says in cli("data", "push", *argv, "--nodes", "a", "--image", "x", code=2).stderr


def test_a_public_bucket_needs_no_credentials(store: Store, tmp_path: Path) -> None:
    put(store, "pets/images.tar", size=5)
    env = {name: value for name, value in store.variables.items() if "KEY" not in name}
    node = target(tmp_path, "a")
    with pytest.raises(DataFailed, match="the store refuses: Unable to locate credentials"):
        download(parse_source(FILE, Path()), [node], Variables(env), print, no_progress)
    anonymous = Variables({**env, "FSSPEC_S3_ANON": "true"})
    assert download(parse_source(FILE, Path()), [node], anonymous, print, no_progress)[1].size == 5


class Here:
    """A download in this process, whose limits a test shortens."""

    def __init__(self, url: str, store: Store, root: Path) -> None:
        self._download = fetch.Download(order(url, store, root, AWS_SECRET_ACCESS_KEY=SECRET))
        self._root, self.done, self.total, self.received = root, 0, 0, 0

    def run(self) -> bytes:
        name = str(self._download.listed()["single"])
        return (self._root / "copies" / self._download.run(self) / "files" / name).read_bytes()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    """Also restores the variables that a download sets, and ends its locks, as the end of its process would."""
    opened = fetch.store.opened

    def unlocked(*arguments: Any) -> Any:
        mine = opened(*arguments)
        fcntl.flock(mine._lock, fcntl.LOCK_UN)  # noqa: SLF001
        return mine

    monkeypatch.setattr(fetch.store, "opened", unlocked)
    monkeypatch.setattr(fetch, "PAUSE", 0.01)
    for name, value in {**store.variables, "AWS_SECRET_ACCESS_KEY": SECRET}.items():
        monkeypatch.setenv(name, value)


def first(store: Store, answer: Callable[[], Answer | None], url: str = FILE, requests: int = 2) -> None:
    """Let the store answer the first GETs of the object's bytes so."""
    left = count(-requests if url == FILE else -requests - 1)  # a web server is looked at with one

    def fault(method: str, path: str) -> Answer | None:
        return answer() if method == "GET" and path.endswith(".tar") and -requests <= next(left) < 0 else None

    store.fault = fault


SHORT = ("206 Partial Content", [("Content-Length", "4194304"), ("Content-Range", "bytes 0-4194303/9437201")], b"short")
URLS = pytest.mark.parametrize("url", [FILE, "{web}/bucket/pets/images.tar"], ids=["s3", "http"])


@URLS
@pytest.mark.parametrize(
    "answer",
    [SHORT, refused("429 Too Many Requests", "SlowDown", ("Retry-After", "1")), refused("503 Busy", "SlowDown")],
    ids=["cut", "429", "503"],
)
@pytest.mark.usefixtures("impatient")
def test_a_request_is_tried_again(
    store: Store, tmp_path: Path, url: str, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "REQUESTS", 1)  # so that the first one is for the first bytes
    body = put(store, "pets/images.tar")
    first(store, lambda: answer, url)
    began = time.monotonic()
    assert Here(url.format(web=store.url), store, tmp_path).run() == body
    assert ("429" not in answer[0]) or time.monotonic() - began >= 1, "Retry-After"


@URLS
@pytest.mark.usefixtures("impatient")
def test_a_store_that_asks_to_wait_long_is_named(store: Store, tmp_path: Path, url: str) -> None:
    put(store, "pets/images.tar")
    first(store, lambda: refused("429 Too Many Requests", "SlowDown", ("Retry-After", "3600")), url)
    with pytest.raises(fetch.FetchError, match=r"the store asks to wait for 3600 s \(429\)"):
        Here(url.format(web=store.url), store, tmp_path).run()


@URLS
@pytest.mark.usefixtures("impatient")
def test_a_store_that_hangs_is_given_up_and_the_next_call_goes_on(
    store: Store, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, over = put(store, "pets/images.tar"), threading.Event()
    try:
        monkeypatch.setattr(remote, "SILENCE", 0.5)
        monkeypatch.setattr(fetch, "TRIES", 2)
        first(store, lambda: over.wait(30) and None, url, requests=1000)
        with pytest.raises(fetch.FetchError, match="no answer: "):
            Here(url.format(web=store.url), store, tmp_path).run()
    finally:
        over.set()
        monkeypatch.setattr(remote, "SILENCE", 30.0)
    store.fault = lambda _method, _path: None
    assert Here(url.format(web=store.url), store, tmp_path).run() == body


def pages(store: Store, *, names: Callable[[int], list[str]], size: int = 5) -> list[int]:
    """Let the store list these names, a page at a time, without an end. Returns the pages so far, which grows."""
    asked: list[int] = []

    def fault(_method: str, path: str) -> Answer | None:
        if path.count("/") > 1 and not path.endswith("/bucket/"):
            return None
        page = len(asked) + 1
        asked.append(page)
        keys = "".join(
            f"<Contents><Key>{name}</Key><Size>{size}</Size><ETag>&quot;{'0' * 32}&quot;</ETag></Contents>"
            for name in names(page)
        )
        body = (
            f"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>{page}</NextContinuationToken>"
            f"{keys}</ListBucketResult>"
        )
        return "200 OK", [("Content-Type", "application/xml")], body.encode()

    store.fault = fault
    return asked


@pytest.mark.parametrize(
    "names",
    [
        lambda page: [f"pets/{page}-{n}" for n in range(100)],
        lambda page: ["pets/the-same"],
        lambda page: ["pets/folder/"],
        lambda page: [],
    ],
    ids=["new names", "the same name", "folders", "nothing"],
)
@pytest.mark.usefixtures("impatient")
def test_a_list_without_an_end_is_refused(store: Store, tmp_path: Path, names: Callable[[int], list[str]]) -> None:
    asked = pages(store, names=names)
    with pytest.raises(fetch.FetchError, match=r"more than 1,000 files.*limits\.data_files in your settings"):
        Here(FOLDER, store, tmp_path).run()
    assert len(asked) <= 1003


@pytest.mark.usefixtures("impatient")
def test_files_are_counted_while_they_are_listed(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "COUNT_EVERY", 0.0)
    pages(store, names=lambda page: [f"pets/{page}"])
    said: list[dict[str, Any]] = []
    with pytest.raises(fetch.FetchError):
        fetch.Download(order(FOLDER, store, tmp_path), lambda **message: said.append(message)).listed()
    assert said == [{"listed": number} for number in range(1, 1001)]


@pytest.mark.usefixtures("impatient")
def test_a_size_below_zero_is_refused(store: Store, tmp_path: Path) -> None:
    pages(store, names=lambda page: ["pets/x"], size=-5)
    with pytest.raises(fetch.FetchError, match="the store gives x a size of -5 bytes"):
        Here(FOLDER, store, tmp_path).run()


def test_a_process_that_lists_ends_with_its_launcher(store: Store, tmp_path: Path) -> None:
    asked = pages(store, names=lambda page: [f"pets/{page}"])
    process = worker.Worker("a", HERE.open(worker.local_argv()), order(FOLDER, store, tmp_path, most_files=10**6))
    while len(asked) < 5:
        process.report(0.05)
    child = process._stream._process  # type: ignore[attr-defined]  # noqa: SLF001
    assert child.poll() is None
    process.close()
    child.wait(10)


@pytest.mark.parametrize("role", ["sink", "fetch"])
def test_a_process_ends_if_the_launcher_is_silent(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """As after a lost connection of which its node hears nothing. One that lists a store lists without an end."""
    monkeypatch.setattr(worker, "SIGN_OF_LIFE", 3600.0)
    pages(store, names=lambda page: [f"pets/{page}"])
    path = Path(worker.__file__).with_name("container_scripts") / "data_node.py"
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for each in path.parent.glob("*.py"):
        (scripts / each.name).write_text(each.read_text().replace("SILENCE = 30.0", "SILENCE = 0.3"))
    monkeypatch.setattr(worker, "_SCRIPTS", scripts)
    orders = {
        "sink": {"role": "sink", "root": str(tmp_path / "copies"), "tls": {}},
        "fetch": order(FOLDER, store, tmp_path, most_files=10**6),
    }
    process = worker.Worker("a", HERE.open(worker.local_argv()), orders[role])
    with closing(process), pytest.raises(DataFailed, match="heard nothing from the launcher for 0 s"):
        process.until("content")


def test_this_machines_downloads_are_private(store: Store, tmp_path: Path, cache: Path) -> None:
    """Also those of earlier versions."""
    put(store, "pets/images.tar", size=5)
    url = f"{store.url}/{BUCKET}/pets/images.tar"
    source, _, _ = downloaded(url, store, target(tmp_path, "a", WITHOUT_WAY_OUT))
    assert cache.stat().st_mode & 0o777 == 0o700
    assert Path(source.path).is_relative_to(cache)
    for mend in (here, lambda: downloaded(url, store, target(tmp_path, "b", WITHOUT_WAY_OUT))):
        cache.chmod(0o755)
        mend()
        assert cache.stat().st_mode & 0o777 == 0o700


def test_this_machine_without_room_is_told_what_moves_its_folder(
    store: Store, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "pets/images.tar", size=5)
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for each in worker._SCRIPTS.glob("*.py"):  # noqa: SLF001
        (scripts / each.name).write_text(each.read_text().replace("SLACK = 64 << 20", "SLACK = 1 << 60"))
    monkeypatch.setattr(worker, "_SCRIPTS", scripts)
    url = f"{store.url}/{BUCKET}/pets/images.tar"
    with pytest.raises(DataFailed, match="free") as error:
        downloaded(url, store, target(tmp_path, "a", WITHOUT_WAY_OUT))
    assert f"another disk for {cache}: export XDG_CACHE_HOME" in str(error.value)
    assert "data_root" not in str(error.value)
    assert not [*cache.glob("partial/*")]


@pytest.mark.usefixtures("impatient")
def test_a_change_during_the_download_discards_it(store: Store, tmp_path: Path) -> None:
    put(store, "pets/images.tar")
    changes = iter([1])

    def fault(method: str, path: str) -> Answer | None:
        if method == "HEAD" and ("GET", path) in store.asked and (seed := next(changes, 0)):
            put(store, "pets/images.tar", seed)
        return None

    store.fault = fault
    with pytest.raises(fetch.FetchError, match="it was changed during the download, which is discarded") as caught:
        Here(FILE, store, tmp_path).run()
    told = worker.failure("a", {"end": caught.value.end, "why": str(caught.value)})
    assert told.next_step == "try again when nobody writes it there: the download starts anew"
    assert not [*tmp_path.glob("copies/*"), *tmp_path.glob("partial/*")]


def test_a_wrong_clock_is_no_lack_of_credentials() -> None:
    said = (
        "An error occurred (RequestTimeTooSkewed) when calling the ListObjectsV2 operation: The difference is too large"
    )
    told = worker.failure("a", {"end": "denied", "why": f"the store refuses: 403 {said}"})
    assert told.next_step == "compare the clocks of the nodes and of this machine: date -u"


@pytest.mark.usefixtures("impatient")
def test_a_file_that_differs_from_the_stores_digest_is_fetched_anew(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two states of an object with the same size, the listing shows the first, and the answers are the second."""
    monkeypatch.setattr(fetch, "REQUESTS", 1)  # so that the first one is for the first bytes
    body = put(store, "pets/images.tar")
    wrong = ("206 Partial Content", [("Content-Range", f"bytes 0-4194303/{SIZE}")], bytes(fetch.RANGE))
    first(store, lambda: wrong, requests=1)
    with pytest.raises(fetch.FetchError, match=r"images\.tar differs from its md5 in the store"):
        Here(FILE, store, tmp_path).run()
    assert Here(FILE, store, tmp_path).run() == body


PART = {"Content-Range": f"bytes 0-4194303/{SIZE}", "Content-Length": "4194304"}


@pytest.mark.parametrize(
    ("headers", "body", "says"),
    [
        ({}, bytes(fetch.RANGE), "it sends no range"),
        ({"Content-Range": f"bytes 1-4194304/{SIZE}"}, bytes(fetch.RANGE), f"it sends bytes 1-4194304/{SIZE}"),
        ({"Content-Range": f"bytes 0-4194303/{SIZE + 1}"}, bytes(fetch.RANGE), f"it sends bytes 0-4194303/{SIZE + 1}"),
        ({**PART, "Content-Length": "4194305"}, bytes(fetch.RANGE + 1), "asked for 4194304 bytes, it sends more"),
        ({**PART, "ETag": f'"{"0" * 32}"'}, bytes(fetch.RANGE), "it was changed during the download"),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_a_wrong_answer_of_s3_is_an_error(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], body: bytes, says: str
) -> None:
    monkeypatch.setattr(fetch, "REQUESTS", 1)
    put(store, "pets/images.tar")
    first(store, lambda: ("206 Partial Content", [*headers.items()], body))
    with pytest.raises(fetch.FetchError, match=re.escape(says)):
        Here(FILE, store, tmp_path).run()
    assert not [*tmp_path.glob("copies/*"), *tmp_path.glob("partial/*")]


@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.usefixtures("impatient")
def test_the_checksum_of_an_object_of_several_parts(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offered: bool
) -> None:
    """Its ETag is none; S3 has another one, if the uploader gave it for the whole object."""
    monkeypatch.setattr(fetch, "REQUESTS", 1)
    body = put(store, "pets/images.tar")
    about = [("ETag", f'"{"0" * 32}-2"'), ("Content-Length", str(SIZE)), ("Last-Modified", formatdate(0, usegmt=True))]
    if offered:
        about.append(("x-amz-checksum-sha256", base64.b64encode(hashlib.sha256(body).digest()).decode()))
    damage = [0]

    def fault(method: str, path: str) -> Answer | None:
        if not path.endswith(".tar"):
            return None
        if method == "HEAD":
            return "200 OK", about, b""
        start = next(offsets) * fetch.RANGE
        part = body[start : start + fetch.RANGE]
        found = [about[0], ("Content-Range", f"bytes {start}-{start + len(part) - 1}/{SIZE}")]
        return "206 Partial Content", found, bytes(len(part)) if damage[0] else part

    store.fault, offsets = fault, count()
    here_ = Here(FILE, store, tmp_path)
    assert here_.run() == body
    assert here_._download.unchecked == (not offered)  # noqa: SLF001
    damage[0], offsets = 1, count()
    other = tmp_path / "other"
    other.mkdir()
    if offered:
        with pytest.raises(fetch.FetchError, match=r"images\.tar differs from its sha256 in the store"):
            Here(FILE, store, other).run()
        assert not [*other.glob("*/*")]


@pytest.mark.usefixtures("impatient")
def test_a_full_disk_is_said_before_anything_is_fetched(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "pets/images.tar")
    monkeypatch.setattr(fetch.store, "SLACK", 1 << 60)
    with pytest.raises(fetch.store.NoRoomError, match="free; 9 MiB and a reserve of"):
        Here(FILE, store, tmp_path).run()
    assert store.sent == 0


class Hub(BaseHTTPRequestHandler):
    """A stand-in for the part of the Hugging Face Hub that its own package asks for a data set or a model."""

    files: ClassVar[dict[str, bytes]] = {}
    large = "data/train.bin"  # in Git LFS
    asked: ClassVar[list[str]] = []
    damaged = False

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        repository = "/datasets/org/name" if "/datasets/" in path else "/org/name"
        api = "/api/datasets/org/name" if "/datasets/" in path else "/api/models/org/name"
        if self.headers["Authorization"] != f"Bearer {SECRET}":
            self.answer(401, b"{}")
        elif path == api:
            self.answer(200, json.dumps({"id": "org/name", "sha": "a" * 40}).encode())
        elif path == f"{api}/tree/main":
            self.answer(200, json.dumps([*map(self.row, self.files)]).encode())
        elif path.startswith(f"{repository}/resolve/main/"):
            start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            self.asked.append(path)
            whole = self.files[path.partition("/main/")[2]]
            part = whole[start : end + 1]
            self.answer(206, bytes(len(part)) if self.damaged else part, f"bytes {start}-{end}/{len(whole)}")
        else:
            self.answer(404, b"{}")

    def row(self, name: str) -> dict[str, Any]:
        body = self.files[name]
        found = {
            "type": "file",
            "path": name,
            "size": len(body),
            "oid": hashlib.sha1(b"blob %d\0%b" % (len(body), body)).hexdigest(),
        }
        lfs = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
        return {**found, "lfs": lfs} if name == self.large else found

    def answer(self, status: int, body: bytes, part: str = "") -> None:
        self.send_response(status)
        if part:
            self.send_header("Content-Range", part)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[type[Hub], dict[str, str]]]:
    """The stand-in, and the variables of its client."""

    class Own(Hub):
        files: ClassVar = {"README.md": b"pets", Hub.large: random.Random(0).randbytes(SIZE)}
        asked: ClassVar = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield Own, {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()


@pytest.mark.parametrize("url", ["hf://datasets/org/name", "hf://org/name"])
def test_a_data_set_or_model_of_the_hub(hub: tuple[type[Hub], dict[str, str]], tmp_path: Path, url: str) -> None:
    """Each file is compared with its digest there: SHA-256 in Git LFS, else Git's."""
    made, variables = hub
    node = target(tmp_path, "a")

    def get(token: str = SECRET) -> tuple[DataSource, Downloaded]:
        given = Variables(variables, {"HF_TOKEN": token})
        return download(parse_source(url, Path()), [node], given, print, no_progress)

    with pytest.raises(DataFailed, match="the store refuses: 401"):
        get("wrong")
    made.damaged = True
    with pytest.raises(DataFailed, match=r"differs from its (git|sha256) in the store"):
        get()
    made.damaged = False
    source, done = get()
    assert {
        str(path.relative_to(source.path)): path.read_bytes() for path in Path(source.path).rglob("*.*")
    } == made.files
    assert done.size == SIZE + 4
    made.asked.clear()
    assert get() == (source, Downloaded())
    assert not made.asked


def test_https_with_a_token_and_an_authority_of_ones_own(tmp_path: Path) -> None:
    authority = tmp_path / "authority.pem"
    authority.write_text(certificate())
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(authority)
    Hub.files["README.md"] = b"pets"
    token = {"FSSPEC_HTTPS": json.dumps({"headers": {"Authorization": f"Bearer {SECRET}"}})}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.socket = secured.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"https://127.0.0.1:{server.server_port}/datasets/org/name/resolve/main/README.md"

        def get(env: dict[str, str], secrets: dict[str, str]) -> DataSource:
            node = target(tmp_path, str(len(env) + len(secrets)))
            return download(parse_source(url, Path()), [node], Variables(env, secrets), print, no_progress)[0]

        with pytest.raises(DataFailed, match="certificate verify failed"):
            get({}, {})
        with pytest.raises(DataFailed, match="the store refuses: 401"):
            get({"SSL_CERT_FILE": str(authority)}, {})
        assert Path(get({"SSL_CERT_FILE": str(authority)}, token).path).read_bytes() == b"pets"
        server.shutdown()


def certificate() -> str:
    """A certificate for 127.0.0.1 that is its own authority, with its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return (builder.sign(key, hashes.SHA256()).public_bytes(pem) + secret).decode()


PACKAGES = (
    "fsspec s3fs aiobotocore aiohttp aioitertools aiosignal aiohappyeyeballs attr botocore dateutil frozenlist idna "
    "jmespath multidict propcache six.py typing_extensions.py urllib3 wrapt yarl"
)


@pytest.fixture
def image(scene: Scene) -> Iterator[str]:
    """An image on the nodes that has s3fs."""
    name, site = (
        "launcher-bed-s3fs",
        f"/opt/venv/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages",
    )
    copying = f"cd {site} && cp -r {PACKAGES} /usr/lib/python3/dist-packages"
    for node in scene.nodes:
        scene.bed.docker(
            node, "run", "--name", name, "-v", "/opt/venv:/opt/venv:ro", "launcher-bed-train", "sh", "-c", copying
        )
        scene.bed.docker(node, "commit", name, name)
        scene.bed.docker(node, "rm", name)
    yield name
    for node in scene.nodes:
        scene.bed.docker(node, "rmi", name)


@pytest.fixture
def reachable(scene: Scene) -> Iterator[Store]:
    """A store that the nodes reach."""
    gateway = scene.bed.sh(scene.nodes[0], "ip route show default").split()[2]
    with s3(gateway) as made:
        yield made


NODES = "node1,node2,node3"


@pytest.mark.ci
@pytest.mark.parametrize("scene", [3], indirect=True)
def test_an_object_leaves_the_store_once_for_three_nodes(
    scene: Scene, reachable: Store, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node downloads it, with the job's secrets, which no container's settings or processes show."""
    cli, bed, store, seen = scene.cli, scene.bed, reachable, list[str]()
    body = put(store, "pets/images.tar")

    def look(method: str, path: str) -> None:
        if method == "GET" and path.endswith(".tar") and not seen:
            seen.append("")
            ids = bed.docker(scene.nodes[0], "ps", "-q").split()
            seen[0] = bed.docker(scene.nodes[0], "inspect", *ids) + bed.sh(scene.nodes[0], "cat /proc/[0-9]*/cmdline")

    store.fault = look
    data = {"pets": {"from": FILE, "at": "/data/images.tar"}}
    run = {"command": ["sha256sum", "/data/images.tar"]}
    (cli.cwd / "key").write_text(SECRET)
    (cli.cwd / "key").chmod(0o600)
    env = {name: value for name, value in store.variables.items() if name != "AWS_SECRET_ACCESS_KEY"}
    keys = {"image": {"ref": image}, "nodes": NODES.split(","), "gpus": "none", "data": data, "run": run}
    job = cli.job("pets", **keys, env=env, secrets=[{"AWS_SECRET_ACCESS_KEY": "key"}])
    assert f"data pets: from {FILE}" in cli("plan", job).stdout
    printed = cli("up", job)
    assert "data pets: downloaded once by node1 (9.4 MB), copied to 2 nodes" in printed.stderr + printed.stdout
    for node in NODES.split(","):
        assert hashlib.sha256(body).hexdigest() in cli("logs", "--node", node, "--no-follow").stdout
    assert store.sent == SIZE
    assert "launcher-data" in seen[0]
    assert SECRET not in seen[0] + printed.stdout + printed.stderr
    cli("up", job)
    assert "pets: the same 1 file on every node" in cli("doctor", job, code=None).stdout
    listed = json.loads(cli("data", "ls", "--nodes", NODES, "--json").stdout)
    assert [(copy["node"], copy["whole"], copy["source"]) for copy in listed] == [
        (node, True, FILE) for node in NODES.split(",")
    ]
    assert cli("data", "verify", FILE, "--nodes", NODES).stdout.count("is whole") == 3
    cli("data", "rm", FILE, "--nodes", "node1", code=3)  # a container of the run has it
    cli("down", "--all")
    cli("data", "rm", FILE, "--nodes", "node1")
    pushed = cli("data", "push", FILE, "--nodes", NODES, "--image", image, *options(store, monkeypatch))
    assert store.sent == SIZE, "node1 gets it from another node"
    put(store, "pets/images.tar", 1)
    pushed = cli("data", "push", FILE, "--nodes", NODES, "--image", image, *options(store, monkeypatch))
    assert "was changed after" in pushed.stderr
    assert "copied to 2 nodes" in pushed.stdout
    assert store.sent == 2 * SIZE
    cli("data", "rm", FILE, "--nodes", NODES)


@pytest.mark.ci
@pytest.mark.parametrize("scene", [3], indirect=True)
def test_this_machine_downloads_for_three_nodes_whose_image_lacks_the_package(
    scene: Scene, reachable: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli, store = scene.cli, reachable
    put(store, "pets/images.tar")
    push = ("data", "push", FILE, "--nodes", NODES, "--image", "launcher-bed-train", *options(store, monkeypatch))
    printed = cli(*push)
    assert f"this machine downloads {FILE}, as the image on node1 cannot: s3:// needs s3fs" in printed.stderr
    assert "downloaded once by this machine (9.4 MB), copied to 3 nodes" in printed.stdout
    assert "the download stays on this machine until `launcher data rm` removes it: " in printed.stderr
    assert store.sent == SIZE
    again = json.loads(cli(*push, "--json").stdout)
    assert (again["downloaded"]["by"], set(again["received"].values()), store.sent) == ("", {0}, SIZE)
    for left in (["node1", "node2", "node3", "this machine"], []):
        listed = json.loads(cli("data", "ls", "--nodes", NODES, "--json").stdout)
        assert [(copy["node"], copy["whole"], copy["source"]) for copy in listed] == [
            (node, True, FILE) for node in left
        ]
        if left:
            assert "this machine: removed" in cli("data", "rm", FILE, "--nodes", NODES).stdout


@pytest.mark.ci
@pytest.mark.parametrize("scene", [1], indirect=True)
def test_a_launcher_that_is_killed_during_a_download_leaves_what_is_there(
    scene: Scene, reachable: Store, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The download ends with it, and the next call goes on."""
    cli, store, size = scene.cli, reachable, 48 * MIB
    put(store, "pets/images.tar", size=size)
    requests, kept, gone = count(1), threading.Event(), threading.Event()

    def hold(method: str, _path: str) -> None:
        """Hold the first request that is sent once another one's pieces are in the copy."""
        if method == "GET" and next(requests) == fetch.REQUESTS + 1:
            kept.set()
            gone.wait(60)

    store.fault = hold
    push = ("data", "push", FILE, "--nodes", "node1", "--image", image, *options(store, monkeypatch))
    process = cli.start(*push)
    assert kept.wait(60)
    assert process.poll() is None
    process.kill()
    process.wait()
    while scene.bed.docker(scene.nodes[0], "ps", "-q"):
        time.sleep(0.1)
    gone.set()
    (copy,) = json.loads(cli("data", "ls", "--nodes", "node1", "--json").stdout)
    assert (copy["whole"], copy["source"], copy["size"], copy["present"] > 0) == (False, FILE, size, True)
    assert f"{48 * MIB / 1e6:.1f} MB, " in cli(*push).stdout
    assert size <= store.sent <= size + fetch.RANGE * fetch.REQUESTS
    cli("data", "rm", FILE, "--nodes", "node1")


def options(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those of `data push`, whose caller has the variables."""
    for name, value in store.variables.items():
        monkeypatch.setenv(name, value)
    return [word for name in store.variables for word in ("--env", name)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scene", [1], indirect=True)
@pytest.mark.parametrize("ending", ["INT", "TERM", "KILL", "cut"])
def test_nothing_is_left_whenever_and_however_a_download_ends(
    scene: Scene, reachable: Store, image: str, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Ten moments: after so many pages of a list without an end, and after so many requests for bytes."""
    cli, bed, store, node = scene.cli, scene.bed, reachable, scene.nodes[0]
    body = put(store, "pets/images.tar", size=64 * MIB)
    own = options(store, monkeypatch)

    def slow(method: str, path: str) -> None:
        if method == "GET" and path.endswith(".tar"):
            time.sleep(0.2)

    for moment in range(10):
        if moment < 5:
            pages(store, names=lambda page: [f"endless/{page}-{n}" for n in range(10)])
            url, needed = f"s3://{BUCKET}/endless/", 1 + 10 * moment
        else:
            store.fault = slow
            url, needed = FILE, 2 + 2 * (moment - 5)
        store.asked.clear()
        process = cli.start("data", "push", url, "--nodes", "node1", "--image", image, *own)
        while len([method for method, _ in store.asked if method == "GET"]) < needed:
            assert process.poll() is None
            time.sleep(0.01)
        if ending == "cut":
            faults.kill_ssh_sessions(bed, node)
        else:
            process.send_signal(getattr(signal, f"SIG{ending}"))
        process.wait(30)
        deadline = time.monotonic() + 10
        while left := bed.docker(node, "ps", "-aq"):
            assert time.monotonic() < deadline, f"moment {moment}: {left}"
            time.sleep(0.1)
        asked = len(store.asked)
        assert "nothing to remove" in cli("clean", "--nodes", "node1").stdout
        assert len(store.asked) == asked
    store.fault = lambda _method, _path: None
    cli("data", "push", FILE, "--nodes", "node1", "--image", image, *own)
    (copy,) = json.loads(cli("data", "ls", "--nodes", "node1", "--json").stdout)
    assert (copy["whole"], copy["size"]) == (True, len(body))
    cli("data", "rm", FILE, "--nodes", "node1")


@pytest.mark.ci
@pytest.mark.parametrize("scene", [1], indirect=True)
def test_clean_finds_the_containers_of_killed_commands(scene: Scene) -> None:
    """Running, and created by an engine whose client was killed before it could start them; not those in use."""
    cli, bed, node = scene.cli, scene.bed, scene.nodes[0]
    uid = bed.sh(node, "id -u trainer").strip()
    marks = ("--label", "launcher.purpose=data", "--label", f"launcher.uid={uid}")
    bed.docker(node, "run", "-d", "--name", f"{TOOL}1", *marks, "launcher-bed-train", "sleep", "600")
    bed.docker(node, "create", "--name", f"{TOOL}2", *marks, "launcher-bed-train", "true")
    bed.docker(node, "create", "--name", "of-another", *marks[:-1], "launcher.uid=1", "launcher-bed-train", "true")
    using = ("docker", "run", "--rm", "--name", f"{TOOL}3", *marks, "launcher-bed-train", "sleep", "600")
    bed.sh(node, f"setsid {shlex.join(using)} >/dev/null 2>&1 </dev/null &")
    while f"{TOOL}3" not in bed.docker(node, "ps", "--format", "{{.Names}}"):
        time.sleep(0.1)
    listed = cli("clean", "--nodes", "node1").stdout
    assert sorted(listed.splitlines()) == [f"node1: container {TOOL}{n} of a killed command" for n in (1, 2)]
    cli("clean", "--nodes", "node1", "--yes")
    left = bed.docker(node, "ps", "-a", "--format", "{{.Names}}").split()
    assert sorted(left) == [f"{TOOL}3", "of-another"]
    bed.docker(node, "rm", "-f", *left)
