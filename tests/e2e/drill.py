"""A run under fault injection, followed line by line with the time of each line."""

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
from tests.e2e.forks import Forked

INTERVAL = 5  # steps between two checkpoints


@dataclass
class Drill:
    """`launcher up` of steps.py in the background."""

    cli: Cli
    process: subprocess.Popen[str] | Forked
    lines: list[tuple[float, str]] = field(default_factory=list)
    messages: list[tuple[float, str]] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        cli: Cli,
        name: str,
        *,
        steps: int = 150,
        seconds: float = 0.1,
        peer_timeout: float = 60,
        variables: dict[str, str] | None = None,
        **keys: Any,
    ) -> Drill:
        """peer_timeout: seconds until the ranks' collectives time out. variables: environment of the program."""
        cli.program("steps.py")
        job = bed_job(
            run={"script": "steps.py", "args": list(map(str, (steps, INTERVAL, seconds, peer_timeout)))}, **keys
        )
        job["env"] |= variables or {}
        return cls.follow(cli, "up", cli.job(name, **job))

    @classmethod
    def follow(cls, cli: Cli, *args: object) -> Drill:
        """Starts any command that follows a run."""
        drill = cls(cli, cli.start(*args))
        for stream, into in ((drill.process.stdout, drill.lines), (drill.process.stderr, drill.messages)):
            drill.readers.append(threading.Thread(target=_read, args=(stream, into), daemon=True))
            drill.readers[-1].start()
        return drill

    def sees(self, words: str, timeout: float = 120, after: float = 0.0) -> float:
        """Waits for a matching line, later than `after`, of the job's output or the launcher; returns its time."""
        deadline = time.monotonic() + timeout
        while True:
            ended = not any(reader.is_alive() for reader in self.readers)
            for at, line in [*self.lines, *self.messages]:
                if at > after and re.search(words, line):
                    return at
            assert time.monotonic() < deadline, f"{words!r} did not appear:\n{self}"
            assert not ended, f"the launcher ended before {words!r} appeared:\n{self}"
            time.sleep(0.05)

    def end(self, code: int, timeout: float = 240) -> float:
        """Waits for the exit code; returns the time of the exit."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end in {timeout} s:\n{self}") from None
        for reader in self.readers:
            reader.join(timeout)
        assert self.process.returncode == code, f"exit code {self.process.returncode}:\n{self}"
        return time.monotonic()

    def stop(self) -> None:
        """Kills the launcher."""
        self.process.kill()
        self.process.wait()

    @property
    def steps(self) -> list[tuple[float, int]]:
        return [(at, int(line.split()[1])) for at, line in self.lines if re.fullmatch(r"step \d+", line)]

    def lost_steps(self) -> list[int]:
        """For each restart of rank 0, how many steps were repeated."""
        lost, last = [], 0
        for _, line in self.lines:
            if match := re.fullmatch(r"rank 0 begins after step (\d+)", line):
                lost.append(last - int(match.group(1)))
            elif match := re.fullmatch(r"step (\d+)", line):
                last = int(match.group(1))
        return lost[1:]

    def recovered(self, fault: float) -> float:
        """Seconds from the fault to the first step after the resulting restart."""
        resumed = next(at for at, line in self.lines if at > fault and "rank 0 begins" in line)
        return next(at for at, _ in self.steps if at > resumed) - fault

    def first(self, words: str, after: float) -> float | None:
        """Seconds from `after` to the first matching message of the launcher, or None."""
        return next((at - after for at, line in self.messages if at > after and re.search(words, line)), None)

    def no_line_lost(self, bed: Bed) -> None:
        """Asserts that the screen showed each line of the master's log once, in order."""
        run = self.cli.runs()[-1].name
        log = bed.sh(bed.nodes[0], f"cat /home/trainer/.launcher/{run}/logs/node1.log")
        assert [line for _, line in self.lines] == log.splitlines()

    def lines_lost(self, bed: Bed, nodes: int) -> int:
        """Number of lines missing, repeated or out of order, in every node's collected files and on the screen.

        For a failed run, the screen does not show the traceback, because it shows the failure instead.
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
        shown = sorted([*self.lines, *self.messages])
        return "\n".join(f"{at - shown[0][0]:7.2f}  {line}" for at, line in shown[-80:])


def kill_rank(bed: Bed, node: Node) -> None:
    """Kills a worker, as the OOM killer would."""
    bed.sh(node, "pkill -KILL -f '^[^ ]*python3 steps.py'")


def kill_container(bed: Bed, node: Node) -> None:
    """Kills pid 1 of the container, and with it everything inside."""
    bed.sh(node, "docker ps -q | xargs docker inspect -f '{{.State.Pid}}' | xargs kill -KILL")


def output_folder(cli: Cli) -> Path:
    return Path("/home/trainer/.launcher", cli.runs()[-1].name)


def _differences(wanted: list[str], seen: list[str]) -> int:
    matcher = difflib.SequenceMatcher(None, wanted, seen, autojunk=False)
    return sum(max(b - a, d - c) for kind, a, b, c, d in matcher.get_opcodes() if kind != "equal")


def _read(stream: Any, into: list[tuple[float, str]]) -> None:
    into.extend((time.monotonic(), line.rstrip("\n")) for line in stream)
