"""A run that something happens to: followed line by line, with the time of each line, while the test breaks things."""

from __future__ import annotations

import difflib
import re
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bed.bed import Bed, Node
from tests.e2e.cli import Cli, bed_job

INTERVAL = 5  # steps between two checkpoints


@dataclass
class Drill:
    """`launcher up` of steps.py in the background."""

    cli: Cli
    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)
    news: list[tuple[float, str]] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        cli: Cli,
        name: str,
        *,
        steps: int = 150,
        seconds: float = 0.1,
        patience: float = 60,
        variables: dict[str, str] | None = None,
        **keys: Any,
    ) -> Drill:
        """patience: of the communication between the ranks, in seconds. variables: for the program."""
        cli.program("steps.py")
        job = bed_job(run={"script": "steps.py", "args": list(map(str, (steps, INTERVAL, seconds, patience)))}, **keys)
        job["env"] |= variables or {}
        return cls.follow(cli, "up", cli.job(name, **job))

    @classmethod
    def follow(cls, cli: Cli, *args: object) -> Drill:
        """Any command that follows a run."""
        drill = cls(cli, cli.start(*args))
        for stream, into in ((drill.process.stdout, drill.lines), (drill.process.stderr, drill.news)):
            threading.Thread(target=_read, args=(stream, into), daemon=True).start()
        return drill

    def sees(self, words: str, timeout: float = 120, after: float = 0.0) -> float:
        """Wait for a line of the job's output or of the launcher's news that came after that time; when it came."""
        deadline = time.monotonic() + timeout
        while True:
            for at, line in [*self.lines, *self.news]:
                if at > after and re.search(words, line):
                    return at
            assert time.monotonic() < deadline, f"never saw {words!r}:\n{self}"
            assert self.process.poll() is None, f"ended before {words!r}:\n{self}"
            time.sleep(0.05)

    def end(self, code: int, timeout: float = 240) -> float:
        """Wait for its exit code; when it came."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end in {timeout} s:\n{self}") from None
        time.sleep(0.3)  # the readers have the last lines
        assert self.process.returncode == code, f"exit code {self.process.returncode}:\n{self}"
        return time.monotonic()

    def stop(self) -> None:
        """For a test that has seen enough."""
        self.process.kill()
        self.process.wait()

    @property
    def steps(self) -> list[tuple[float, int]]:
        return [(at, int(line.split()[1])) for at, line in self.lines if re.fullmatch(r"step \d+", line)]

    def lost_steps(self) -> list[int]:
        """For each time that rank 0 began anew: how many steps were done again."""
        lost, last = [], 0
        for _, line in self.lines:
            if match := re.fullmatch(r"rank 0 begins after step (\d+)", line):
                lost.append(last - int(match.group(1)))
            elif match := re.fullmatch(r"step (\d+)", line):
                last = int(match.group(1))
        return lost[1:]

    def recovered(self, fault: float) -> float:
        """Seconds from the fault to the first step after the restart that it caused."""
        again = next(at for at, line in self.lines if at > fault and "rank 0 begins" in line)
        return next(at for at, _ in self.steps if at > again) - fault

    def first(self, words: str, after: float) -> float | None:
        """Seconds from `after` to the first news like this; None where there was none."""
        return next((at - after for at, line in self.news if at > after and re.search(words, line)), None)

    def no_line_lost(self, bed: Bed) -> None:
        """What was shown is what the master's log holds, each line once, in order."""
        run = self.cli.runs()[-1].name
        log = bed.sh(bed.nodes[0], f"cat /home/trainer/.launcher/{run}/logs/node1.log")
        assert [line for _, line in self.lines] == log.splitlines()

    def lines_lost(self, bed: Bed, nodes: int) -> int:
        """Lines that are missing, doubled or out of place: in the files brought here, of every node, and on the screen.

        On the screen the traceback of a run that failed is left out, for the failure itself is shown instead.
        """
        run, wrong = self.cli.runs()[-1], 0
        for node in bed.nodes[:nodes]:
            there = bed.sh(node, f"cat /home/trainer/.launcher/{run.name}/logs/{node.alias}.log").splitlines()
            here = (run / "logs" / f"{node.alias}.log").read_text().splitlines()
            wrong += _differences(there, here)
            if node.index == 1:
                shown = [line for _, line in self.lines]
                wrong += _differences(there if self.process.returncode == 0 else there[: len(shown)], shown)
        return wrong

    def __str__(self) -> str:
        shown = sorted([*self.lines, *self.news])
        return "\n".join(f"{at - shown[0][0]:7.2f}  {line}" for at, line in shown[-80:])


def kill_rank(bed: Bed, node: Node) -> None:
    """The kernel's out-of-memory killer takes a worker."""
    bed.sh(node, "pkill -KILL -f '^[^ ]*python3 steps.py'")


def kill_container(bed: Bed, node: Node) -> None:
    """The container's pid 1 dies, and all in it."""
    bed.sh(node, "docker ps -q | xargs docker inspect -f '{{.State.Pid}}' | xargs kill -KILL")


def output_folder(cli: Cli) -> Path:
    return Path("/home/trainer/.launcher", cli.runs()[-1].name)


def _differences(wanted: list[str], seen: list[str]) -> int:
    matcher = difflib.SequenceMatcher(None, wanted, seen, autojunk=False)
    return sum(max(b - a, d - c) for kind, a, b, c, d in matcher.get_opcodes() if kind != "equal")


def _read(stream: Any, into: list[tuple[float, str]]) -> None:
    into.extend((time.monotonic(), line.rstrip("\n")) for line in stream)
