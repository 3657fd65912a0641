"""The progress bar: only on a terminal, and never mixed into a line of output."""

import io
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.runs import ROOT, digit_tree
from train.log import Bar, clock

OPTIONS = "--arch smallcnn --image-size 8 --epochs 2 --batch-size 8 --workers 1 --threads 1 --device cpu --log-every 2"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "0:07"), (750, "12:30"), (3723, "1:02:03")])
def test_time_left_is_shown_as_h_mm_ss(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_bar_grows_and_is_cleared_before_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    bar = Bar(out)
    bar.clear()
    assert out.getvalue() == ""
    for step in (1, 50, 100):
        bar.step(1, 2, step, 100)
    bar.clear()
    first, *_, last, cleared = out.getvalue().split("\r")
    assert first.startswith(f"epoch 1/2 [{'.' * 24}] step 1/100 1%")
    assert last.startswith(f"epoch 1/2 [{'#' * 24}] step 100/100 100%  ETA 0:00")
    assert cleared == "\x1b[K"


def test_a_narrow_terminal_truncates_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    Bar(out).step(1, 2, 1, 100)
    assert len(out.getvalue().partition("\x1b")[0]) == 19


def test_a_file_or_a_pipe_gets_no_bar() -> None:
    out = io.StringIO()
    Bar(out).step(1, 2, 100, 100)
    assert out.getvalue() == ""


@pytest.mark.ci
def test_the_trainer_shows_the_bar_on_a_terminal(tmp_path: Path) -> None:
    data = digit_tree(tmp_path / "data", 40, 10)
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "train", "--data", str(data), "--output", str(tmp_path / "out"), *OPTIONS.split()]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=theirs, stderr=theirs, env=os.environ | {"COLUMNS": "120"})
    os.close(theirs)
    seen = b""
    while select.select([ours], [], [], 200)[0]:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        seen += piece
    os.close(ours)
    assert process.wait(60) == 0, seen.decode()
    lines = [re.sub(r".*\x1b\[K", "", line.rpartition("\r")[2]) for line in seen.decode().split("\r\n")]
    assert re.search(r"epoch 2/2 \[#{24}\] step 10/10 100%", seen.decode())
    assert any(line.startswith("Epoch: [2][5/5] Loss ") for line in lines)
    assert lines[-2].startswith("train: done in ")
