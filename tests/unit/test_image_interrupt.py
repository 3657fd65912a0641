"""Ctrl-C during image work stops the program immediately, without waiting for a node's current step."""

import signal
import subprocess
import sys
import time

import pytest

STEP = 60  # seconds
# Engines with one slow step, named by argv[1]; prints `ready` when it has begun
PROGRAM = f"""
import io, os, sys, tarfile, time
from launcher.image.ensure import ensure
from launcher.image.image_locations import ImageLocations
from launcher.job.parts import Image
from launcher.model.facts import ImageInfo
from launcher.node.machine import Done

LAYERS = ("sha256:" + "a" * 64,)
INFO = ImageInfo("sha256:" + "b" * 64, ("x:1",), (), "amd64", (), {{}}, LAYERS, 1000)

def slow(step):
    if sys.argv[1] == step:
        os.write(1, b"ready\\n")
        time.sleep({STEP})

class Store:
    def __init__(self, has):
        self.has = has

    def inspect(self, name):
        if not self.has:
            slow("inspect")
        return INFO if self.has else None

    def list(self, labels):
        slow("survey")
        return []

    def save(self, name):
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as out:
            out.addfile(tarfile.TarInfo("x"))
        yield archive.getvalue()
        slow("save")

    def load(self, pieces):
        slow("load")
        for _ in pieces:
            pass

class Node:
    def __init__(self, node, has):
        self.node = self.host = node
        self.images = Store(has)

    @property
    def machine(self):
        return self

    def script(self, text):
        return Done(0, b"/elsewhere zfs []", b"", 0.0, 0.0)  # a store that only the engine itself can read

nodes = [Node(n, has=n == "a") for n in "abc"[: int(sys.argv[2])]]
ensure(Image(ref="x:1"), ImageLocations(nodes, None, print), job="x")
"""


@pytest.mark.parametrize(
    ("step", "nodes"),
    [("inspect", 2), ("inspect", 3), ("survey", 2), ("survey", 3), ("save", 3), ("load", 2), ("load", 3)],
)
def test_ctrl_c_stops_image_work_immediately(step, nodes, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, step, str(nodes)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={"XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    lines = iter(process.stdout.readline, "")
    assert any(line == "ready\n" for line in lines), process.communicate()[1]
    time.sleep(0.5)  # until the main thread waits: CPython may miss a signal that comes just before (as of 3.11)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=2 * STEP)
    assert time.monotonic() - began < STEP / 2, err  # 0.1 s on an idle machine
    assert "KeyboardInterrupt" in err
