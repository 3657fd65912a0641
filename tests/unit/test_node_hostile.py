"""Data from a node is not trusted: it may be truncated by a lost connection, a full disk or a kill, or malicious.

It is read, ignored, or rejected with an error that names the node. It causes neither a traceback nor a
file outside the run's folder.
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from launcher.errors import LauncherError, NodeUnreachable
from launcher.local_files import parse_object
from launcher.model.container import ContainerState, Phase
from launcher.node.docker.engine import DockerEngine
from launcher.node.files import Files, Span, parse_scan
from launcher.node.machine import CommandStream, LocalMachine
from launcher.records.collect import OutputFolder, collect
from launcher.records.store import NodeOfRun
from launcher.records.wanted import want
from launcher.run.end.evidence import gather
from launcher.run.end.outcome import last_epoch
from tests.failures import first_failure

quick = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
OUTPUT_FILES = (
    *("logs/a.log", "logs/a.clock", "logs/rank-0.log", "errors/a.json", "state/a.attempts"),
    *("metrics.jsonl", "tensorboard/events.out.tfevents.1", "checkpoints/last.pt"),
)
ERROR_FILE = {"message": {"message": "m", "extraInfo": {"py_callstack": "Traceback", "timestamp": "17"}}}


def torn(whole: bytes) -> st.SearchStrategy[bytes]:
    """Prefixes of the text, the text with parts replaced, and arbitrary bytes."""
    return st.one_of(
        st.integers(0, len(whole)).map(lambda end: whole[:end]),
        st.tuples(st.integers(0, len(whole)), st.binary(max_size=8)).map(
            lambda cut: whole[: cut[0]] + cut[1] + whole[cut[0] + len(cut[1]) :]
        ),
        st.binary(max_size=200),
    )


def ended(code: int | None) -> ContainerState:
    return ContainerState("id", "c", "i", {}, Phase.EXITED, code, False, 0, 1.0, 2.0, "")


contents = st.fixed_dictionaries(
    {
        "logs/a.log": torn(
            b"[rank0]: Traceback (most recent call last):\n  File x\nKeyError: 1\nRoot Cause\n rank : 0 \n"
            b"Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File x\n"
        ),
        "errors/a.json": st.one_of(torn(json.dumps(ERROR_FILE).encode()), values.map(lambda v: json.dumps(v).encode())),
        "state/a.attempts": torn(b"start 100\nexit 1 110\nstart 111\n"),
        "logs/rank-0.log": torn(
            b"Traceback (most recent call last):\n  File y\nRuntimeError: Connection closed by peer\n"
        ),
    }
)


@given(contents, st.sampled_from([1, 124, 125, 137, 143, 255]))
@quick
def test_error_files(files: dict[str, bytes], code: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        node = NodeOfRun("a", "a", 0, "c", folder, range(1))
        found = first_failure([gather(Path(folder), node, ended(code), files["logs/a.log"])])
    assert found is not None
    assert (found.node, found.exit_code) == ("a", code)
    found.words.encode("utf-8")  # it can be printed


@given(
    st.one_of(
        torn(b'{"kind": "epoch", "epoch": 3, "val": {"top1": 1.5}}'), values.map(lambda v: json.dumps(v).encode())
    )
)
@quick
def test_lines_of_metrics(line: bytes) -> None:
    found = parse_object(line)
    assert found is None or isinstance(found, dict)
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(line)
        last = last_epoch(Path(file.name))
    assert last == {} or last["kind"] == "epoch"


paths = st.one_of(
    st.text(st.sampled_from("./\\ ab~\n"), max_size=12),
    st.lists(
        st.sampled_from(["..", ".", "", "logs", "state", "errors", "tensorboard", "a.tfevents.1", "x"]), max_size=5
    ).map("/".join),
)


@given(paths, st.booleans())
@settings(max_examples=500, deadline=None)
def test_no_path_from_a_node_leaves_the_runs_folder(path: str, checkpoints: bool) -> None:
    wanted = want(path, checkpoints=checkpoints)
    if wanted is not None:
        root = Path("/somewhere/runs/r")
        assert (root / wanted.local).resolve().is_relative_to(root)
        assert (root / wanted.local).resolve() != root


@given(
    st.lists(st.sampled_from(["tensorboard", "logs", "errors", "state", "a.tfevents.1", "b"]), max_size=4), st.data()
)
@quick
def test_files_are_collected_whatever_their_names(parts: list[str], data: st.DataObject) -> None:
    """A file where a folder is expected, and vice versa."""
    with tempfile.TemporaryDirectory() as there, tempfile.TemporaryDirectory() as here:
        Path(here, "logs").mkdir()
        for _ in range(3):
            names = data.draw(st.permutations(parts))
            path = Path(there, *names) if names else Path(there, "metrics.jsonl")
            with contextlib.suppress(OSError):  # the test itself may have created a folder there
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"x")
        collect([OutputFolder(Files(LocalMachine("a", "me")), there, ())], Path(here), checkpoints=True)
        outside = [p for p in Path(here).rglob("*") if not p.resolve().is_relative_to(Path(here).resolve())]
        assert outside == []


@given(torn(b"f 12 1700000000.5 logs/a.log\x00l 0 1700000000.0 metrics.jsonl\x007 x errors/b\x00"))
@quick
def test_a_listing_of_files(listing: bytes) -> None:
    assert all(entry.size >= 0 and entry.path for entry in parse_scan(listing))


class Says(LocalMachine):
    """A node whose shell prints this for every command."""

    def __init__(self, said: bytes) -> None:
        super().__init__("a", "me")
        self.said = said

    def open(self, argv: Sequence[str], *, lasting: bool = False) -> CommandStream:
        marker = argv[-1].encode()  # an argument, so the node knows it
        text = self.said.replace(b"MARK", marker)
        return super().open(["python3", "-c", f"import os; os.write(1, {text!r}); os.write(2, {text!r})"])


said = st.lists(st.sampled_from([b"MARK\n", b"3\n", b"abc", b"0\n", b"99999999999\n", b"-1\n", b"\xff", b"1 x\n"])).map(
    b"".join
)


@pytest.mark.ci
@given(said)
@settings(max_examples=60, deadline=None)
def test_arbitrary_answers_when_files_are_read(said: bytes) -> None:
    files, spans = Files(Says(said)), [Span("/o/a", 0, 5), Span("/o/b", 0, 5)]
    with contextlib.suppress(LauncherError):
        assert sum(len(piece) for _, piece in files.read_spans(spans, below="/o")) <= 10
    following = files.tail("/o/a", 0, {"/o/b": 0}, below="/o")
    with contextlib.closing(following) as follower, contextlib.suppress(NodeUnreachable):
        while found := follower.next(1):
            assert found[0] in ("/o/a", "/o/b")


class Answers(BaseHTTPRequestHandler):
    """An engine that sends a given response."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    body: bytes = b""
    status = 200

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = type(self).body
        self.send_response(type(self).status)
        self.send_header("Api-Version", "1.41")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _answer  # noqa: N815 - names required by http.server

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 100  # with Python's 5, some connections wait for a second


@pytest.fixture(scope="module")
def engine() -> Iterator[DockerEngine]:
    server = Server(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def dial() -> socket.socket:
        return socket.create_connection(("127.0.0.1", server.server_port))

    machine = LocalMachine("gpu-a", "me")
    found = DockerEngine("gpu-a", "gpu-a", machine, dial)
    yield found
    found.close()
    server.shutdown()
    server.server_close()


INSPECTED = {
    "Id": "c" * 64,
    "Name": "/c",
    "Image": "sha256:1",
    "Config": {"Labels": {"launcher.run": "r"}, "Env": ["A=b"]},
    "State": {"Status": "exited", "ExitCode": 1, "StartedAt": "2026-01-01T00:00:00Z"},
    "RootFS": {"Layers": ["a"]},
}


@st.composite
def misshapen(draw: st.DrawFn) -> bytes:
    """A response with one value replaced at any depth, a list of it, or arbitrary JSON."""
    whole: Any = json.loads(json.dumps(INSPECTED))
    part, key = whole, draw(st.sampled_from(sorted(whole)))
    while isinstance(part[key], dict) and draw(st.booleans()):
        part, key = part[key], draw(st.sampled_from(sorted(part[key])))
    part[key] = draw(values)
    return draw(
        st.one_of(
            st.just(json.dumps(whole).encode()),
            st.just(json.dumps([whole]).encode()),
            values.map(lambda value: json.dumps(value).encode()),
            torn(json.dumps(whole).encode()),
        )
    )


@pytest.mark.ci
@given(misshapen(), st.sampled_from([200, 200, 200, 404, 409, 500]))
@example(b"[" * 100_000, 200)
@settings(max_examples=50, deadline=None)  # each runs programs
def test_arbitrary_answers_of_the_engine(engine: DockerEngine, body: bytes, status: int) -> None:
    Answers.body, Answers.status = body, status
    for ask in (
        lambda: engine.inspect("c"),
        lambda: engine.list({"launcher.run": "r"}),
        engine.facts,
        lambda: engine.images.inspect("image"),
        lambda: engine.images.list({"launcher.run": None}),
        lambda: engine.stop("c", 1),
        lambda: engine.logs("c"),
        lambda: engine.wait("c", 0.01),
        lambda: engine.remove("c"),
        lambda: engine.images.pull("image"),
        lambda: engine.images.digest("image"),
        lambda: list(engine.images.save("image")),
        lambda: engine.images.load([b"x"]),
    ):
        refused = None
        try:
            ask()
        except LauncherError as error:
            refused = error.where
        assert refused in (None, "gpu-a")
