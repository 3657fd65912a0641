"""Which files of a run's output folder are brought here, to which path, and how they change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from launcher.records import generations
from launcher.records.paths import GENERATIONS

RECORDINGS = "flight_recorder"  # the folder of what ranks that hang write down (container_scripts/flight_recorder.py)


@dataclass(frozen=True)
class Want:
    """Where a file of the output folder goes below the local folder.

    grows: only ever; others are written anew. text: secrets are masked in it; in TensorBoard's files, which have
    checksums, and in checkpoints it would destroy them.
    """

    local: str
    grows: bool
    text: bool = False


def want(path: str, *, checkpoints: bool = False) -> Want | None:
    """What to do with the file at `path`, relative to the output folder; None: leave it there.

    The path comes from a node, so it is not trusted: one that would leave the local folder is ignored.
    """
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or parts[0] == "/" or "\\" in path or not path.isprintable():
        return None
    if parts == ("metrics.jsonl",) or (len(parts) > 1 and parts[0] in ("logs", "state")):
        return Want(path, grows=True, text=True)
    if len(parts) > 2 and parts[0] == GENERATIONS:
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
