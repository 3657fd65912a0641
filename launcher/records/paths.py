"""Every path of a run, on the caller's side and below the output folder of a node, made in one place."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from pathlib import Path

from launcher.model.plan import RunId

RUNS = Path("runs")


@dataclass(frozen=True)
class RunPaths:
    """`runs/<run id>/` beside the caller."""

    root: Path

    @classmethod
    def of(cls, run: RunId, runs: Path = RUNS) -> RunPaths:
        return cls(runs / run)

    @property
    def run(self) -> RunId:
        return self.root.name

    @property
    def job(self) -> Path:
        return self.root / "job.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def code(self) -> Path:
        return self.root / "code.tar.gz"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def result(self) -> Path:
        return self.root / "result.json"


@dataclass(frozen=True)
class NodePaths:
    """The run's output folder on a node; several nodes may share it (a network home, nodes on one machine)."""

    output: str
    node: str

    @property
    def log(self) -> str:
        """Everything that the node's processes printed, in order."""
        return posixpath.join(self.output, "logs", f"{self.node}.log")

    @property
    def clock(self) -> str:
        """Lines `<epoch seconds> <bytes of the log by then>`."""
        return posixpath.join(self.output, "logs", f"{self.node}.clock")

    @property
    def attempts(self) -> str:
        """Lines `start <epoch>` and `exit <code> <epoch>`."""
        return posixpath.join(self.output, "state", f"{self.node}.attempts")

    @property
    def error(self) -> str:
        """torchrun's error file: the first worker of this node that failed with a recorded exception."""
        return posixpath.join(self.output, "errors", f"{self.node}.json")

    @property
    def metrics(self) -> str:
        return posixpath.join(self.output, "metrics.jsonl")

    def rank_log(self, rank: int) -> str:
        return posixpath.join(self.output, "logs", f"rank-{rank}.log")
