"""Which files of a run's output folder are collected, to which path, and how they change."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from launcher.elastic import generations
from launcher.model.container import WORKDIR
from launcher.records.paths import NCCL

EVENTS = "*.tfevents.*"  # names of TensorBoard's files
RECORDINGS = "flight_recorder"  # folder of the recordings of ranks that hang (launcher.hangs)
# folders and files of experiment trackers, which work offline
TRACKERS = ("wandb", "mlflow.db", "mlruns", ".trackio")


@dataclass(frozen=True)
class Want:
    """How to collect a file of the output folder. local: its path below the local folder.

    grows: the file is append-only; others are replaced. text: secrets are masked; masking would corrupt TensorBoard's
    files, which have checksums, and checkpoints.
    """

    local: str
    grows: bool
    text: bool = False


def want(path: str, *, checkpoints: bool = False, trackers: bool = False) -> Want | None:
    """Return how to collect the file at `path`, relative to the output folder; None: do not collect it.

    trackers: also what experiment trackers wrote, to the output folder or to the working directory. The path comes from
    a node and is not trusted: paths outside the local folder are ignored.
    """
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or parts[0] == "/" or "\\" in path or not path.isprintable():
        return None
    if parts[0] == WORKDIR:
        if len(parts) < 3:
            return None
        if ".tfevents." in parts[-1]:
            return Want(f"tensorboard/{path}", grows=True)
        return Want(path, grows=False) if checkpoints or (trackers and parts[2] in TRACKERS) else None
    if trackers and parts[0] in TRACKERS:
        return Want(path, grows=False)
    if parts[0] == "logs" and re.search(
        f"{NCCL}$", parts[-1]
    ):  # written anew by a process with the same PID after a restart
        return Want(path, grows=False, text=True)
    if parts == ("metrics.jsonl",) or (len(parts) > 1 and parts[0] in ("logs", "state")):
        return Want(path, grows=True, text=True)
    if len(parts) > 2 and parts[0] == generations.GENERATIONS:
        text = len(parts) == 3 and generations.TEXT.fullmatch(parts[2]) is not None
        known = generations.FOLDER.fullmatch(parts[1]) and (text or ".tfevents." in parts[-1])
        return Want(path, grows=True, text=text) if known else None
    if len(parts) > 1 and parts[0] == "errors":
        return Want(path, grows=False, text=True)
    if len(parts) > 1 and parts[0] == "tensorboard":
        return Want(path, grows=True)
    if ".tfevents." in parts[-1]:
        return Want(f"tensorboard/{path}", grows=True)
    if len(parts) > 1 and (parts[0] == RECORDINGS or (checkpoints and parts[0] == "checkpoints")):
        return Want(path, grows=False)
    return None
