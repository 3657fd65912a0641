"""What is whose in a run's output folder, which files are collected, to which path, and how they change."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from launcher.elastic import generations
from launcher.model.container import WORKDIR
from launcher.node.output_folder import MARKER, OF_COMMAND
from launcher.records.paths import ASIDE, NCCL

EVENTS = "*.tfevents.*"  # names of TensorBoard's files
RECORDINGS = "flight_recorder"  # folder of the recordings of ranks that hang (launcher.hangs)
CHECKPOINTS = "checkpoints"  # the trainer saves here and resumes from here automatically
# folders and files of experiment trackers, which work offline
TRACKERS = ("wandb", "mlflow.db", "mlruns", ".trackio")
_SAVED = re.compile(r"checkpoint|ckpt|\.(pt|pth|pth\.tar|safetensors|npz|pkl)$", re.IGNORECASE)
_SOURCE = re.compile(r"\.(py|pyi|pyc|ipynb|sh|c|cc|cpp|cu|cuh|h|hpp|md|rst|ya?ml|toml|cfg|ini)$", re.IGNORECASE)

# What the launcher itself writes to an output folder, beside the code. Everything else there is the program's.
_STATE = rf"{re.escape(MARKER)}|{re.escape(OF_COMMAND)}[a-z]+" + (
    r"|\.flight_recorder\.tar|\.node/.*|logs/[^/]+\.clock"
    r"|state/([^/]+\.(alive|attempts|began|groups|master)|budget|slurm\.end|node\.sh|bundle/.*)"
)
_OUTPUT = rf"(logs/[^/]+|generations/\d+-\d+/rank-\d+)\.log|logs/[^/]+{NCCL}|errors/[^/]+\.json|{RECORDINGS}/.*"
_OURS = re.compile(f"{_STATE}|{_OUTPUT}", re.DOTALL)
_OF_NO_USE = re.compile(_STATE, re.DOTALL)  # once the run has ended
# What a program writes at the places that the launcher gives it, so that it is collected while the run goes on.
_AT_ITS_PLACE = re.compile(r"metrics\.jsonl|(generations/\d+-\d+/)?(metrics\.jsonl|tensorboard/.*)", re.DOTALL)


def is_ours(path: str) -> bool:
    """Whether the launcher writes the file of an output folder."""
    return _OURS.fullmatch(path) is not None


def is_of_no_use(path: str) -> bool:
    """Whether it is one of ours that nobody misses once the run has ended."""
    return _OF_NO_USE.fullmatch(path) is not None


def is_programs(path: str) -> bool:
    """Whether a file of an output folder is the program's, without its metrics and curves at the places for these.

    In a working directory: if it is not of the code (records.workdir).
    """
    place = _AT_ITS_PLACE.fullmatch(path)
    return not is_ours(path) and (place is None or _is_saved_there(path))


def _is_saved_there(path: str) -> bool:
    """Whether a file below tensorboard/ is a checkpoint, which loggers put beside their curves."""
    _, found, rest = path.partition("tensorboard/")
    return bool(found) and ".tfevents." not in rest and is_saved(rest)


def is_saved(path: str) -> bool:
    """Whether the name of a file is that of a checkpoint, and not of a program that writes some."""
    return _SAVED.search(path) is not None and _SOURCE.search(path) is None


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

    checkpoints: also all that the program wrote. trackers: also what experiment trackers wrote, to the output folder or
    to the working directory. The path comes from a node and is not trusted: paths outside the local folder are ignored.
    """
    if not is_safe(path):
        return None
    parts = PurePosixPath(path).parts
    inner = parts[2:] if parts[0] == WORKDIR else parts
    if ".tfevents." in parts[-1]:
        at_its_place = parts[0] in ("tensorboard", generations.GENERATIONS)
        return Want(path if at_its_place else f"tensorboard/{path}", grows=True)
    if is_ours(path):
        grows = parts[0] in ("logs", "state", generations.GENERATIONS) and not re.search(f"{NCCL}$", parts[-1])
        collected = parts[0] in ("logs", "state", "errors", RECORDINGS, generations.GENERATIONS)
        return Want(path, grows, text=parts[0] != RECORDINGS) if collected else None
    if is_programs(path):
        return Want(path, grows=False) if checkpoints or (trackers and inner[:1] and inner[0] in TRACKERS) else None
    metrics = parts[-1] == "metrics.jsonl" and "tensorboard" not in parts
    return Want(path, grows=metrics, text=metrics)


def is_safe(path: str) -> bool:
    """Whether a path that comes from a node may be one below a local folder."""
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts and not path.startswith("/") and "\\" not in path and path.isprintable()


def aside(path: str, node: str) -> str:
    """Return where a program's file is put, below the local folder, if it cannot have its own path there."""
    return f"{ASIDE}/{node}/{path}"
