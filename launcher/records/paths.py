"""All paths of a run, on this machine and in the output folder of a node."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.elastic.generations import GENERATIONS
from launcher.errors import UsageError
from launcher.model.container import WORKDIR
from launcher.model.plan import RunId

RUNS = Path("runs")
ASIDE = "output"  # in runs/<run id>/: files of the output folder of a node that cannot be at their own path
LAYER = "container"  # in runs/<run id>/: files that a program wrote elsewhere in a node's container, LAYER/NODE/PATH
RECORD_FILES = ("job.yaml", "plan.json", "code.tar.gz", "left_out.json", "events.jsonl", "result.json")
NCCL = r"\.nccl\.[0-9]{1,10}"  # in logs/: NCCL's log of a process, after the node's name


def as_shown(path: Path) -> Path:
    """Return a local path as messages show it: from the working directory if it is below that."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


class RunPaths:
    """`runs/<run id>/` in the caller's working directory, which a program may change later."""

    def __init__(self, root: Path) -> None:
        self.root = root = root.absolute()
        self.run: RunId = root.name
        self.job = root / "job.yaml"
        self.plan = root / "plan.json"
        self.code = root / "code.tar.gz"
        self.left_out = root / "left_out.json"  # what is in the code folder and was not sent
        self.events = root / "events.jsonl"
        self.logs = root / "logs"
        self.tensorboard = root / "tensorboard"
        self.metrics = root / "metrics.jsonl"
        self.result = root / "result.json"


class NodePaths:
    """The run's output folder on a node; several nodes may share it (a network home, nodes on one machine)."""

    def __init__(self, output: str, node: str) -> None:
        self.output = output
        self.workdir = f"{output}/{WORKDIR}/{node}"  # the code, and what the program writes beside it
        self.log = f"{output}/logs/{node}.log"  # all output of the node's processes, in order
        self.clock = f"{output}/logs/{node}.clock"  # lines `<epoch seconds> <bytes of the log by then>`
        self.attempts = f"{output}/state/{node}.attempts"  # launcher.run.watch.attempts
        self.budget = f"{output}/state/budget"
        self.alive = f"{output}/state/{node}.alive"  # with a hang timeout: grows while a rank is debugged
        self.groups = f"{output}/state/{node}.groups"  # launcher.run.membership
        self.error = f"{output}/errors/{node}.json"  # torchrun's error file: the first worker's exception
        self.metrics = f"{output}/metrics.jsonl"
        self.nccl_names = re.escape(node) + NCCL  # a pattern

    def rank_log(self, rank: int) -> str:
        return f"{self.output}/logs/rank-{rank}.log"

    def in_generation(self, number: int, node_rank: int) -> str:
        """Folder of a member in a generation of a job with min_nodes: metrics, TensorBoard logs, rank logs."""
        return f"{self.output}/{GENERATIONS}/{number:04}-{node_rank}"


def not_a_folder(path: Path) -> str:
    """Return why an existing `path` is not a folder, such as a link to an unmounted disk, else ""."""
    if not (path.exists() or path.is_symlink()) or path.is_dir():  # in this order: another run may just create it
        return ""
    if not path.is_symlink():
        return "is not a folder"
    return f"is a link to {path.readlink()}, which {'is not a folder' if path.exists() else 'does not exist'}"


def require_folder(path: Path) -> None:
    """Raise UsageError if `path` exists and is not a folder. A missing folder is not an error."""
    if what := not_a_folder(path):
        linked = path.is_symlink()
        fix = "mount or create that folder, or remove the link" if linked else "move it: runs are recorded here"
        raise UsageError(str(as_shown(path)), what, fix)
