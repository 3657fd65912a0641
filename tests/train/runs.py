"""Start trainers like a user, one process per rank over gloo, each with its own output folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

from tests.ports import free_port
from tests.train.forks import Forked

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "jobs" / "data" / "digits.tar"
Process = subprocess.Popen[str] | Forked
OLD = not hasattr(torch.distributed.fsdp, "fully_shard")  # torch before 2.6
REFUSED_BY_OLD = {"fsdp", "hsdp", "pipeline"}
SECONDS = 300  # time limit of a run; runs take a few seconds, ten times longer on a busy machine


STARTED: list[Process] = []  # tests/train/conftest.py ends those that a failed test leaves behind


@dataclass
class Rank:
    """A process and its output so far."""

    process: Process
    output: Path
    lines: list[str] = field(default_factory=list)
    ended: bool = False  # its output is closed
    _arrived: threading.Condition = field(default_factory=threading.Condition)

    def read(self) -> None:
        """Collects lines until the process closes its output."""
        assert self.process.stdout
        for line in self.process.stdout:
            with self._arrived:
                self.lines.append(line.rstrip("\n"))
                self._arrived.notify_all()
        with self._arrived:
            self.ended = True
            self._arrived.notify_all()

    def wait_for(self, text: str) -> None:
        """Waits until a line with `text` was printed; fails at the end of the process."""
        with self._arrived:
            self._arrived.wait_for(lambda: self.ended or any(text in line for line in self.lines), SECONDS)
            found = any(text in line for line in self.lines)
        assert found, f"no line with {text!r} in:\n" + self.text

    def wait_until_it_catches_sigterm(self) -> None:
        """Waits until a signal does not just end it; fails if that takes too long."""
        deadline, status = time.monotonic() + SECONDS, Path(f"/proc/{self.process.pid}/status")
        while (
            not int(re.findall(r"^SigCgt:\s*(\w+)$", status.read_text(), re.MULTILINE)[0], 16) >> signal.SIGTERM - 1 & 1
        ):
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def read_to_the_end(self) -> None:
        """Waits for the last lines of an ended process; not for long, as a process that it started may hold them."""
        with self._arrived:
            self._arrived.wait_for(lambda: self.ended, 10)

    @property
    def text(self) -> str:
        """The complete output."""
        return "\n".join(self.lines)

    @property
    def digest(self) -> str:
        """The SHA-256 of the weights, printed with --print-digest."""
        return next(found[1] for line in self.lines if (found := re.match(r"train: rank \d+ weights (\w+)$", line)))

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of one kind."""
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == kind]

    def checkpoint(self, name: str = "last.pt") -> dict[str, Any]:
        """A checkpoint, read with plain torch."""
        state: dict[str, Any] = torch.load(self.output / "checkpoints" / name, weights_only=True)
        return state


def start(
    output: Path,
    world: int,
    *args: object,
    program: tuple[str, ...] = ("-m", "train"),
    nodes: int = 1,
    env: Mapping[str, str] | None = None,
    own: Sequence[str] = (),
) -> list[Rank]:
    """Starts `world` ranks; rank r's LAUNCHER_OUTPUT is output/r, as if each ran on its own machine.

    nodes: how many machines they take themselves to be on. own: options of each rank alone.
    """
    if OLD and not REFUSED_BY_OLD.isdisjoint(args):
        pytest.skip("torch before 2.6")
    local = world // nodes
    port, ranks = free_port(), []
    for rank in range(world):
        variables = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
            "LAUNCHER_OUTPUT": str(output / str(rank)),
            **(env or {}),
        }
        process: Process
        argv = [*program, *map(str, args), *(own[rank].split() if own else ())]
        if program[0] != "-c":
            process = Forked(argv, ROOT, variables)
        else:
            process = subprocess.Popen(
                [sys.executable, *argv],
                cwd=ROOT,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        STARTED.append(process)
        ranks.append(Rank(process, output / str(rank)))
        threading.Thread(target=ranks[-1].read, daemon=True).start()
    return ranks


def finish(ranks: list[Rank], seconds: float = SECONDS) -> list[int]:
    """Wait for the exit codes; a run that does not finish is killed and fails the test."""
    try:
        return [rank.process.wait(seconds) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.kill()
            rank.read_to_the_end()


def run(
    output: Path,
    world: int,
    *args: object,
    seconds: float = SECONDS,
    program: tuple[str, ...] = ("-m", "train"),
    nodes: int = 1,
    env: Mapping[str, str] | None = None,
    own: Sequence[str] = (),
) -> list[Rank]:
    """Starts and waits; every rank must exit with 0."""
    ranks = start(output, world, *args, program=program, nodes=nodes, env=env, own=own)
    codes = finish(ranks, seconds)
    assert codes == [0] * world, "\n\n".join(rank.text for rank in ranks)
    return ranks


def digit_tree(folder: Path, train: int, val: int, across: bool = False) -> Path:
    """A data folder with the first `train` and `val` digits, alternating between classes.

    `across`: both are taken from all 1,797 digits, ignoring the archive's split.
    """
    with tarfile.open(DIGITS) as tar:
        names = [name for name in tar.getnames() if name.endswith(".jpg")]
        if across:
            ordered = _in_turn(names)
            chosen = {"train": ordered[:train], "val": ordered[train : train + val]}
        else:
            chosen = {
                split: _in_turn([name for name in names if name.startswith(f"{split}/")])[:count]
                for split, count in (("train", train), ("val", val))
            }
        for split, found in chosen.items():
            for name in found:
                _, label, file = name.split("/")
                target = folder / split / label / file
                target.parent.mkdir(parents=True, exist_ok=True)
                member = tar.extractfile(name)
                assert member
                target.write_bytes(member.read())
    return folder


def _in_turn(names: list[str]) -> list[str]:
    """The first of each class, then the second of each, and so on."""
    turns: dict[str, int] = {}
    keyed = []
    for name in sorted(names):
        label = name.split("/")[1]
        turns[label] = turns.get(label, 0) + 1
        keyed.append((turns[label], name))
    return [name for _, name in sorted(keyed)]
