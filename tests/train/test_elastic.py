"""Nodes without a master, as processes on loopback addresses: any of them is lost, and training goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.runs import ROOT, digit_tree, free_port

SCRIPTS = ROOT / "launcher" / "container_scripts"
LOST_AFTER = 6.0
TRAIN = "--arch smallcnn --image-size 8 --batch-size 4 --epochs 60 --checkpoint-every 5 --log-every 1 --workers 1"
pytestmark = pytest.mark.timeout(400)


class Node:
    """What the engine does: starts the agent again when it fails."""

    def __init__(self, folder: Path, name: str, meeting: dict[str, object], data: Path) -> None:
        self.folder, self.name, self.restarts = folder / name, name, 0
        kit = self.folder / "kit"
        kit.mkdir(parents=True)
        for script in ("elastic.py", "meeting.py"):
            shutil.copy(SCRIPTS / script, kit)
        self.env = os.environ | {
            "LAUNCHER_MEETING": json.dumps(meeting),
            "LAUNCHER_MEETING_KEY": "key",
            "LAUNCHER_NODE": name,
            "LAUNCHER_RUN": "run",
            "LAUNCHER_MIN_NODES": "2",
            "LAUNCHER_OUTPUT": str(self.folder / "output"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        program = ["torchrun", "-m", "train", "--data", str(data), *TRAIN.split()]
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

    def lose(self, number: signal.Signals) -> None:
        """SIGKILL: everything of it is gone; SIGSTOP: silent."""
        os.killpg(self.process.pid, number)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    data = digit_tree(tmp_path / "data", 60, 10)
    addresses = {name: f"127.0.0.1:{free_port()}" for name in "abc"}
    meeting = {"order": list("abc"), "size": 3, "least": 2, "lost_after": LOST_AFTER, "processes": 1}
    started = [Node(tmp_path, name, {**meeting, "addresses": addresses}, data) for name in "abc"]
    yield started
    for node in started:
        for number in (signal.SIGCONT, signal.SIGKILL):
            node.lose(number) if node.process.poll() is None else None


def engine(nodes: list[Node], text: str, seconds: float = 150) -> Node:
    """Starts again what fails, until one of these nodes has printed a line with `text`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for node in nodes:
            if text in node.log:
                return node
            if node.process.poll() not in (None, 0) and node.restarts < 10:
                node.restarts += 1
                node.start()
        time.sleep(0.2)
    raise AssertionError(f"no {text!r} in:\n" + "\n".join(f"--- {node.name}\n{node.log}" for node in nodes))


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_training_goes_on_without_any_node(nodes: list[Node], lost: int, fault: signal.Signals) -> None:
    engine(nodes, "Epoch: [3][")
    victim = nodes.pop(lost)
    victim.lose(fault)
    at = time.monotonic()
    engine(nodes, f"world 2 of 3 without {victim.name}")
    first = engine(nodes, "train: resumed")
    engine([first], "train: done in", 200)
    print(f"{fault.name} of {victim.name}: {time.monotonic() - at:.1f} s to the end")
