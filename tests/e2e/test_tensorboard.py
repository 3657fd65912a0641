"""`launcher tensorboard` on a finished run of the bed, viewed in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from tests.bed.fixtures import unavailable
from tests.e2e import browser
from tests.e2e.cli import ROOT, Cli, bed_job

pytestmark = [pytest.mark.bed, pytest.mark.timeout(600)]

CURVES = ("Loss/train", "Loss/val", "Accuracy/train", "Accuracy/val")
EPOCHS = 3
LINE = 0.3  # fraction of a chart's columns: far outliers are not drawn
FILTER = urllib.parse.quote("^(Loss|Accuracy)/")
# For each card of the page: its tag, its text with the table of values, and the position of its chart.
CARDS = """
Object.fromEntries([...document.querySelectorAll('card-view')].flatMap(card => {
  const title = card.querySelector('tb-truncated-path'), chart = card.querySelector('line-chart .series-view');
  if (!title || !chart) return [];
  const box = chart.getBoundingClientRect();
  return [[title.getAttribute('title'),
           {text: card.innerText, x: box.x, y: box.y, width: box.width, height: box.height}]];
}))
"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = browser.program()
    if found is None:
        unavailable("no Chromium on this machine: apt-get install chromium")
    return found


@contextmanager
def served(cli: Cli, *args: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield `launcher tensorboard` and the address that it prints; it is terminated even if the test fails."""
    process = cli.start("tensorboard", "--port", 0, *args)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+/", line)
        assert found, f"no address in {line!r}; {process.communicate(timeout=30) if not line else ''}"
        yield process, found.group()
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=30)


def scalars(address: str, run: str, tag: str) -> list[tuple[int, float]]:
    """Return (step, value) of a curve, from TensorBoard's API."""
    query = urllib.parse.urlencode({"run": run, "tag": tag})
    with urllib.request.urlopen(f"{address}data/plugin/scalars/scalars?{query}", timeout=20) as answer:
        return [(int(step), float(value)) for _, step, value in json.load(answer)]


def tags(address: str) -> dict[str, list[str]]:
    """Return the tags that TensorBoard has read so far, by run."""
    with urllib.request.urlopen(f"{address}data/plugin/scalars/tags", timeout=20) as answer:
        return {run: list(found) for run, found in json.load(answer).items()}


def inked_columns(picture: Path, box: dict[str, float]) -> float:
    """Return the fraction of a chart's pixel columns with colour, which only the curve has: axes and grid are grey."""
    with Image.open(picture) as image:
        x, y = int(box["x"]), int(box["y"])
        chart = image.convert("RGB").crop((x, y, x + int(box["width"]), y + int(box["height"])))
    inked = 0
    for column in range(chart.width):
        pixels = (chart.getpixel((column, row)) for row in range(chart.height))
        inked += any(max(pixel) - min(pixel) > 20 for pixel in pixels if isinstance(pixel, tuple))
    return inked / chart.width


def servers(folder: Path) -> set[str]:
    """Return the process IDs of TensorBoard servers with this temporary folder."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue  # it has just exited
            if b"tensorboard.main" in line and f"{folder}/launcher-tensorboard-".encode() in line:
                found.add(entry.name)
    return found


def train(cli: Cli) -> str:
    """Run a small job on both nodes and return the run ID."""
    shutil.copytree(ROOT / "train", cli.cwd / "train", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "jobs/data/digits.tar", cli.cwd)
    args = {
        "data": "digits.tar",
        "arch": "smallcnn",
        "image_size": 32,
        "val_resize": 32,
        "augment": "shift",
        "flip": 0,
        "epochs": EPOCHS,
        "batch_size": 16,
        "lr": 0.16,
        "log_every": 5,
    }
    cli("up", cli.job("curves", **bed_job(run={"module": "train", "args": args})), timeout=300)
    return cli.runs()[-1].name


def test_the_page_shows_the_loss_and_accuracy_curves_of_a_run(bed_cli: Cli, chromium: str, tmp_path: Path) -> None:
    run = train(bed_cli)
    with served(bed_cli) as (process, address):
        deadline = time.monotonic() + 60
        while not (known := tags(address)) or not all(tag in known[next(iter(known))] for tag in CURVES):
            assert time.monotonic() < deadline, known
            time.sleep(0.5)
        name = next(iter(known))
        assert name.split("/")[0] == run, "the curve does not have its run's name"
        for tag in CURVES:
            points = scalars(address, name, tag)
            assert [step for step, _ in points] == sorted({step for step, _ in points}), (tag, points)
            assert len(points) >= EPOCHS, (tag, points)
        losses = [value for _, value in scalars(address, name, "Loss/val")]
        accuracies = [value for _, value in scalars(address, name, "Accuracy/val")]
        assert losses[-1] < losses[0]
        assert accuracies[-1] > max(30.0, accuracies[0])

        picture = tmp_path / "tensorboard.png"
        with browser.browser(chromium, tmp_path / "profile") as page:
            page.open(f"{address}?tagFilter={FILTER}&smoothing=0#timeseries")
            wanted = json.dumps(CURVES)
            page.wait_for(f"(cards => {wanted}.every(tag => cards[tag]?.text.includes('Value')))({CARDS})", 60)
            deadline = time.monotonic() + 30
            while True:  # a web worker draws the lines, a moment after the rest
                cards = page.evaluate(CARDS)
                page.screenshot(picture)
                lines = {tag: inked_columns(picture, cards[tag]) for tag in CURVES}
                if all(share > LINE for share in lines.values()) or time.monotonic() > deadline:
                    break
        print(f"the page: {picture}")
        assert all(share > LINE for share in lines.values()), f"no line in a chart: {lines}; see {picture}"
        for tag, values in (("Loss/val", losses), ("Accuracy/val", accuracies)):
            assert f"{values[-1]:.6g}"[:5] in cards[tag]["text"], (tag, values[-1], cards[tag]["text"])

        process.send_signal(signal.SIGINT)  # like Ctrl-C
        _, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert "Traceback" not in err, err


def test_a_port_in_use_is_said(cli: Cli) -> None:
    cli("up", cli.job("here", runtime="process", nodes=["local"], run={"command": ["true"]}))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process = cli.start("tensorboard", "--port", port)
        assert process.stderr is not None
        said = next(line for line in process.stderr if "in use" in line)
        process.terminate()
        process.communicate(timeout=60)
    assert said.startswith(f"launcher: warning: port {port} of this machine is in use: TensorBoard listens on ")


TERMINATED = """
import os, signal, subprocess
start = subprocess.Popen.__init__

def terminated(self, argv, *args, **options):
    start(self, argv, *args, **options)
    if "tensorboard.main" in argv:
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen.__init__ = terminated
"""


def test_a_sigterm_while_tensorboard_starts_leaves_no_server(cli: Cli, tmp_path: Path) -> None:
    """It comes when the server is there, and the launcher does not know it yet."""
    cli("up", cli.job("here", runtime="process", nodes=["local"], run={"command": ["true"]}))
    (tmp_path / "sitecustomize.py").write_text(TERMINATED)
    variables = {"TMPDIR": str(tmp_path), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    Cli(cli.cwd, {**cli.env, **variables})("tensorboard", "--port", 0)
    assert not servers(tmp_path)


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGINT])
def test_tensorboard_ends_on_request_and_leaves_no_server(cli: Cli, way: signal.Signals, tmp_path: Path) -> None:
    """A run on this machine is enough; no bed is needed."""
    cli("up", cli.job("here", runtime="process", nodes=["local"], run={"command": ["true"]}))
    with served(Cli(cli.cwd, {**cli.env, "TMPDIR": str(tmp_path)})) as (process, address):
        assert len(servers(tmp_path)) == 1
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert answer.status == 200
        process.send_signal(way)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, "")
        assert err.splitlines() in ([], [f"launcher: the latest run is {cli.runs()[-1].name}"])
    assert not servers(tmp_path)
    assert not list(tmp_path.glob("launcher-tensorboard-*"))
