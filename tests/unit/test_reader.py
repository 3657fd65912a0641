"""The files of a node: each byte is reported once, from the node or from the collected copies."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from launcher.errors import NodeUnreachable
from launcher.node.files import Files, Span
from launcher.node.machine import LocalMachine
from launcher.node.process.engine import ProcessEngine
from launcher.records.collect import collect, output_folders
from launcher.records.store import NodeOfRun
from launcher.run.watch import messages, observed
from launcher.run.watch.messages import Message
from launcher.run.watch.observed import Moment, Shown
from launcher.run.watch.reader import Event, NodeReader, Wanted

LOG = b"".join(b"line %d\n" % number for number in range(30_000)) + b"no end"
METRICS = b"".join(b'{"kind": "step", "step": %d}\n' % step for step in range(20_000))
ATTEMPTS = b"start 100\nexit 1 109\nstart 110\nstopped me@here 120\n"
FILES = {"logs/a.log": LOG, "metrics.jsonl": METRICS, "state/a.attempts": ATTEMPTS}


class Node:
    """A node with a local output folder; stores the reported log bytes and all other messages."""

    def __init__(self, folder: Path, offset: int = 0) -> None:
        self.output = folder / "node"
        for name, data in FILES.items():
            (self.output / name).parent.mkdir(parents=True, exist_ok=True)
            (self.output / name).write_bytes(data)
        self.node = NodeOfRun("a", "local", 0, "launcher-a", str(self.output), range(1))
        self.copies = folder / "runs"
        self.engine = ProcessEngine("a")
        shown = Shown(self.node, f"{self.output}/logs/a.log", offset)
        self.known = observed.begin(
            "job-20260101-000000-abcd", [self.node], [shown], Moment(0, 0), elastic=False, isolates=True
        )
        self.reader = NodeReader(self.node, self.engine, self.wanted, self.take)
        self.log = b""
        self.others: list[Message] = []

    def wanted(self) -> Wanted:
        return self.known.nodes["a"].wanted()

    def take(self, event: Event) -> None:
        self.known, found, _ = observed.reduce(self.known, event, Moment(0, 0))
        for message in found:
            if isinstance(message, messages.Output):
                self.log += message.data
            else:
                self.others.append(message)

    def read_rest(self) -> None:
        self.reader.read_rest(self.engine.files, str(self.output))

    def steps(self) -> list[int]:
        return [message.fields["step"] for message in self.others if isinstance(message, messages.Progress)]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def check_all_reported_once(node: Node) -> None:
    assert node.log == LOG
    assert node.steps() == list(range(20_000))
    left = [message for message in node.others if not isinstance(message, messages.Progress)]
    restarted = messages.NodeRestarted("a", 1, "exit code 1 after 9 s")
    assert sorted(left, key=repr) == sorted([restarted, messages.NodeStopped("a", "me@here")], key=repr)


def test_data_reported_while_a_file_grew_is_not_reported_again_with_the_rest(node: Node) -> None:
    """The connection is lost at several positions."""
    for size in (1, 100_000, 200_000):
        until = time.monotonic() + 30
        node.reader.follow(lambda size=size, until=until: len(node.log) < size and time.monotonic() < until)  # type: ignore[misc]
    node.read_rest()
    check_all_reported_once(node)


def test_reading_the_rest_resumes_after_a_lost_connection(node: Node) -> None:
    class Cut(Files):
        def read_spans(self, spans: Sequence[Span], *, below: str) -> Generator[tuple[Span, bytes], None, None]:
            for number, (span, piece) in enumerate(super().read_spans(spans, below=below)):
                if number == 3:
                    raise NodeUnreachable("a", "is away")
                yield span, piece

    tries = 0
    while len(node.log) < len(LOG):
        tries += 1
        try:
            node.reader.read_rest(Cut(LocalMachine("a", "me")), str(node.output))
        except NodeUnreachable:
            assert tries < 50
    assert tries > 1
    check_all_reported_once(node)


def test_the_rest_of_an_unreachable_node_is_read_from_the_collected_files(node: Node) -> None:
    until = time.monotonic() + 30
    node.reader.follow(lambda: len(node.log) < 1000 and time.monotonic() < until)
    collect(output_folders({"a": node.engine}, [node.node]), node.copies)
    node.reader.read_rest(Files(LocalMachine("this machine", "")), str(node.copies))
    check_all_reported_once(node)


def test_a_log_is_read_from_where_it_is_shown(tmp_path: Path) -> None:
    node = Node(tmp_path, offset=len(LOG) - 6)
    node.read_rest()
    assert node.log == b"no end"
