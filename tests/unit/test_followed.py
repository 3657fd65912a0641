"""The followed files of a node: each byte is reported once, from the node or from the collected copies."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from launcher.errors import NodeUnreachable
from launcher.node.connect import Fleet
from launcher.node.files import Files, Span
from launcher.node.machine import LocalMachine
from launcher.node.process.engine import ProcessEngine
from launcher.records.collect import collect, output_folders
from launcher.records.store import NodeOfRun, Record
from launcher.run import messages
from launcher.run.followed import Followed, FollowedFiles
from launcher.run.locate import Attached
from launcher.run.messages import Message

RUN = "job-20260101-000000-aaaa"
LOG = b"".join(b"line %d\n" % number for number in range(30_000)) + b"no end"
METRICS = b"".join(b'{"kind": "step", "step": %d}\n' % step for step in range(20_000))
ATTEMPTS = b"start 100\nexit 1 109\nstart 110\nstopped me@here 120\n"


class Node:
    """A node with a local output folder; stores the reported log bytes and all other messages."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "node"
        for name, data in {"logs/a.log": LOG, "metrics.jsonl": METRICS, "state/a.attempts": ATTEMPTS}.items():
            (self.output / name).parent.mkdir(parents=True, exist_ok=True)
            (self.output / name).write_bytes(data)
        self.node = NodeOfRun("a", "local", 0, "launcher-a", str(self.output), range(1))
        self.record = Record.rebuild(RUN, "process", [self.node], folder / "runs")
        engines = {"a": ProcessEngine("a")}
        self.attached = Attached(self.record, (self.node,), engines, Fleet([*engines.values()], {}, None))
        self.log = b""
        self.others: list[Message] = []

    def put(self, message: Message) -> None:
        if isinstance(message, messages.Output):
            self.log += message.data
        else:
            self.others.append(message)

    def followed(self, offset: int = 0) -> FollowedFiles:
        shown = Followed(self.node, f"{self.node.output}/logs/a.log", offset)
        return FollowedFiles(self.node, shown, self.attached, self.put, self.put, 1 << 40)

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
    files = node.followed()
    for size in (1, 100_000, 200_000):
        until = time.monotonic() + 30
        files.follow(lambda size=size, until=until: len(node.log) < size and time.monotonic() < until)  # type: ignore[misc]
    files.read_rest(node.attached.engines["a"].files, node.node.output)
    check_all_reported_once(node)
    for name, data in {"logs/a.log": LOG, "metrics.jsonl": METRICS, "state/a.attempts": ATTEMPTS}.items():
        assert (node.record.paths.root / name).read_bytes() == data


def test_reading_the_rest_resumes_after_a_lost_connection(node: Node) -> None:
    class Cut(Files):
        def read_spans(self, spans: Sequence[Span], *, below: str) -> Generator[tuple[Span, bytes], None, None]:
            for number, (span, piece) in enumerate(super().read_spans(spans, below=below)):
                if number == 3:
                    raise NodeUnreachable("a", "is away")
                yield span, piece

    files, tries = node.followed(), 0
    while len(node.log) < len(LOG):
        tries += 1
        try:
            files.read_rest(Cut(LocalMachine("a", "me")), node.node.output)
        except NodeUnreachable:
            assert tries < 50
    assert tries > 1
    check_all_reported_once(node)


def test_the_rest_of_an_unreachable_node_is_read_from_the_collected_files(node: Node) -> None:
    files, root = node.followed(), node.record.paths.root.absolute()
    until = time.monotonic() + 30
    files.follow(lambda: len(node.log) < 1000 and time.monotonic() < until)
    collect(output_folders(node.attached.engines, [node.node]), root)
    files.read_rest(Files(LocalMachine("this machine", "")), str(root))
    check_all_reported_once(node)


def test_data_after_a_gap_is_shown_but_stored_by_the_collector(node: Node) -> None:
    node.followed(offset=len(LOG) - 6).read_rest(node.attached.engines["a"].files, node.node.output)
    assert node.log == b"no end"
    here = node.record.paths.root / "logs" / "a.log"
    assert here.read_bytes() == b""
    collect(output_folders(node.attached.engines, [node.node]), node.record.paths.root)
    assert here.read_bytes() == LOG
