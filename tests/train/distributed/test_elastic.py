"""Nodes without a master, as processes on a loopback address: training continues if any of them is lost."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.container_scripts import scripts
from tests.ports import free_port
from tests.train.runs import ROOT, SECONDS, digit_tree, run, start

LOST_AFTER = 10.0
OPTIONS = "--arch smallcnn --image-size 8 --batch-size 4 --epochs 20 --log-every 1 --workers 1 --print-digest"
pytestmark = pytest.mark.timeout(600)


class Node:
    """A node with its engine, which restarts the agent when it fails."""

    def __init__(self, folder: Path, name: str, meeting: dict[str, object], port: int, program: list[str]) -> None:
        self.folder, self.name, self.restarts = folder / name, name, 0
        kit = self.folder / "kit"
        kit.mkdir(parents=True)
        for script, text in scripts().items():
            (kit / script).parent.mkdir(parents=True, exist_ok=True)
            (kit / script).write_bytes(text)
        self.address = ("127.0.0.1", port)
        self.env = os.environ | {
            "LAUNCHER_MEETING": json.dumps(meeting),
            "LAUNCHER_MEETING_KEY": "key",
            "LAUNCHER_NODE": name,
            "LAUNCHER_RUN": "run",
            "LAUNCHER_MIN_NODES": str(meeting["least"]),
            "LAUNCHER_OUTPUT": str(self.folder / "output"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self.argv = [sys.executable, str(kit / "elastic.py"), *program]
        self.start()

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.argv, cwd=ROOT, env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the node: SIGKILL to lose it, SIGSTOP to make it silent."""
        mark = f"LAUNCHER_OUTPUT={self.env['LAUNCHER_OUTPUT']}\0".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                if mark in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), number)


class Engine:
    """Restarts failed nodes, like their engines."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes, self.left = nodes, list(nodes)

    def __getitem__(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not done():
            for node in self.left:
                if node.process.poll() not in (None, 0) and node.restarts < 10:
                    node.restarts += 1
                    node.signal(signal.SIGKILL)  # what it left behind, as at the end of a container
                    node.start()
            logs = "\n".join(f"--- {node.name}\n{node.log}" for node in self.nodes)
            assert time.monotonic() < deadline, f"{what} did not come:\n{logs}"
            time.sleep(0.1)

    def says(self, text: str, *names: str) -> Node:
        """Return the first of these nodes, or of all remaining ones, with such a line."""
        nodes = [self[name] for name in names] or self.left
        self.until(lambda: any(re.search(text, node.log, re.MULTILINE) for node in nodes), text)
        return next(node for node in nodes if re.search(text, node.log, re.MULTILINE))

    def lose(self, name: str, number: signal.Signals) -> None:
        self.left.remove(self[name])
        self[name].signal(number)

    def ends(self) -> None:
        """All remaining nodes exit with 0."""
        self.until(lambda: all(node.process.poll() == 0 for node in self.left), "the end of all nodes")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 60, 10)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    started: list[Node] = []

    def begin(names: str, size: int, least: int, *program: str, lost_after: float = LOST_AFTER) -> Engine:
        ports = {name: free_port() for name in names}
        meeting: dict[str, object] = {"order": list(names), "size": size, "least": least, "processes": 1}
        meeting |= {"lost_after": lost_after, "addresses": {name: f"127.0.0.1:{port}" for name, port in ports.items()}}
        started.extend(Node(tmp_path / "nodes", name, meeting, port, list(program)) for name, port in ports.items())
        return Engine(started)

    yield begin
    for node in started:
        node.signal(signal.SIGKILL)
        node.process.wait()


@pytest.mark.ci
def test_weights_equal_those_of_a_run_that_changes_its_size_at_the_same_step(
    begin: Callable[..., Engine], data: Path, tmp_path: Path
) -> None:
    """The first node, with rank 0 and the store, is killed; undisturbed: three ranks up to that epoch, then two."""
    options = ["--data", str(data), *OPTIONS.split()]
    engine = begin("abc", 3, 2, "torchrun", "-m", "train", *options)
    engine.says(r"^Epoch: \[3\]\[", "a")
    engine.lose("a", signal.SIGKILL)
    engine.says(r"rank 0 is now on b, world 2 of 3: a lost at \d\d:\d\d UTC$", "b")
    engine.ends()
    resumed = re.search(r"^train: resumed .* at epoch (\d+), step 0$", engine["b"].log, re.MULTILINE)
    assert resumed, engine["b"].log
    assert len(re.findall("; global batch 12, ", engine["b"].log)) == 1
    whole = start(tmp_path / "whole", 3, *options, "--keep", 20, nodes=3)
    kept = whole[0].output / "checkpoints" / f"epoch-{int(resumed.group(1)) - 1:04d}.pt"
    Engine([]).until(kept.exists, str(kept))
    for rank in whole:
        rank.process.kill()
    undisturbed = run(tmp_path / "rest", 2, *options, "--resume", kept, env={"LAUNCHER_FULL_WORLD": "3"})
    digests = set(re.findall(r"^train: rank \d+ weights (\w+)$", engine["b"].log, re.MULTILINE))
    assert digests == {undisturbed[0].digest}


@pytest.mark.slow
def test_a_spare_replaces_a_silent_node_which_detects_it_on_resuming(begin: Callable[..., Engine], data: Path) -> None:
    options = ["--data", str(data), *OPTIONS.split(), "--checkpoint-every", "5"]
    engine = begin("abcs", 3, 3, "torchrun", "-m", "train", *options)
    engine.says("^launcher: waiting until a node is lost; rank 0 is on a$", "s")
    engine.says(r"^Epoch: \[3\]\[", "a")
    engine.lose("b", signal.SIGSTOP)
    for name in "acs":
        engine.says(r"^launcher: generation \d+: rank 0 is now on a, world 3 of 3: b lost at \d\d:\d\d UTC$", name)
    engine.says("^train: resumed ", "a")
    engine["b"].signal(signal.SIGCONT)
    engine.left.append(engine["b"])
    engine.says("^launcher: generation 1 ended on this node: ", "b")
    engine.ends()
    assert "train: done in" in engine["a"].log
    assert engine["b"].log.count("rank 0 is now on") == 1


def signed_with(key: bytes, **state: object) -> bytes:
    """Return a message in the nodes' format, from another run or from an attacker."""
    body = json.dumps({"members": [], "hears": [], **state}).encode()
    return hmac.new(key, body, hashlib.sha256).hexdigest().encode() + b" " + body + b"\n"


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["a", "c"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_training_continues_without_any_node(
    begin: Callable[..., Engine], data: Path, lost: str, fault: signal.Signals
) -> None:
    engine = begin("abc", 3, 2, "torchrun", "-m", "train", "--data", str(data), *OPTIONS.split())
    engine.says(r"^Epoch: \[3\]\[", "a")
    engine.lose(lost, fault)
    engine.says(f"world 2 of 3: {lost} lost at")
    engine.ends()


def test_a_command_gets_its_world_and_no_stranger_changes_it(begin: Callable[..., Engine], tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    report = (
        "echo $LAUNCHER_GENERATION $LAUNCHER_WORLD $LAUNCHER_RANK $LAUNCHER_MASTER $RANK of $WORLD_SIZE, $MASTER_PORT"
    )
    waits = f"{report}; until [ -e {seen} ]; do sleep 0.2; done"
    engine = begin("abc", 3, 2, "command", "sh", "-c", waits, lost_after=4.0)
    engine.says(r"^1 3 2 127\.0\.0\.1:(\d+) 2 of 3, \1$", "c")
    for line in (b"\xff\n", b"x" * 100_000, b"0 {}\n", signed_with(b"another key", node="a", life=9, phase="done")):
        with socket.create_connection(engine["c"].address) as link, suppress(OSError):
            link.sendall(line)
    engine.lose("a", signal.SIGKILL)
    engine.says(r"^\d+ 2 1 127\.0\.0\.1:(\d+) 1 of 2, \1$", "c")
    seen.touch()
    engine.ends()


@pytest.mark.slow
def test_a_second_loss_ends_the_run_with_the_reason(begin: Callable[..., Engine]) -> None:
    engine = begin("abc", 3, 2, "command", "sleep", "1000")
    engine.says("world 3 of 3", "a")
    engine.lose("a", signal.SIGKILL)
    engine.says("world 2 of 3", "c")
    engine.lose("b", signal.SIGKILL)
    engine.says("^launcher: generation 2 ended on this node: no message from b for 10 s$", "c")
    engine.says("^launcher: only c of at least 2 nodes can be reached from this node$", "c")
    engine.until(lambda: engine["c"].restarts == 10 and engine["c"].process.poll() == 1, "the end of c")
    assert "this node has already stopped: only c of" in engine["c"].log
