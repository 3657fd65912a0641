"""Random histories on plain processes keep the sentences of docs/promise.md; one is played by its command."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bed.bed import Bed
from tests.e2e.cli import ROOT
from tests.histories import play
from tests.histories.bed import BedWorld
from tests.histories.checker import check
from tests.histories.history import Asked, Began, Exited

pytestmark = pytest.mark.timeout(1200)  # of commands that wait for each other, on a machine with any load


@pytest.mark.ci
@pytest.mark.parametrize("seed", ["ci-1", "ci-2", "ci-3"])
def test_three_histories_keep_all_sentences(seed: str, tmp_path: Path) -> None:
    history = play.play(play.plan(seed, steps=6), tmp_path)
    assert check(history) == []
    assert history.all(Began)  # it was about something
    assert len(history.all(Exited)) == len(history.all(Asked)) >= 6


def test_no_command_of_a_history_reaches_the_engine_of_this_machine(tmp_path: Path) -> None:
    world = play.World(tmp_path, "http://127.0.0.1:9")
    (tmp_path / "one" / "job.yaml").write_text("{name: j, image: {ref: x}, nodes: [local], run: {command: ['true']}}")
    refused = world.cli["one"]("up", "job.yaml", code=3)
    assert "engine does not answer" in refused.stderr


@pytest.mark.slow
def test_a_history_on_the_bed_keeps_all_sentences(bed: Bed, tmp_path: Path) -> None:
    steps = play.plan("slow", steps=10, place=play.BED)
    history = play.play(steps, tmp_path, functools.partial(BedWorld, bed))
    assert check(history) == []
    assert history.all(Began)


@pytest.mark.slow
def test_the_command_plays_and_says_what_it_has_hit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.histories", "--seed", "slow", "--histories", "2", "--into", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed slow: 2 histories" in done.stdout
    assert "| up -d |" in done.stdout
