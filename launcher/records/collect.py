"""Bringing a run's files from its nodes to the caller. Append-only files: only bytes that are new travel.

The local file's size is the memory of how far we came, so a killed launcher, or another one, goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from launcher.node.engine import FileEntry, Files

PIECE = 1 << 22


@dataclass(frozen=True)
class Want:
    """Where a file of the output folder goes below the local folder, and whether it only ever grows."""

    local: str
    grows: bool


def want(path: str, *, checkpoints: bool = False) -> Want | None:
    """What to do with the file at `path`, relative to the output folder; None: leave it there.

    The path comes from a node, so it is not trusted: one that would leave the local folder is left.
    """
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or parts[0] == "/" or "\\" in path:
        return None
    if parts == ("metrics.jsonl",) or (len(parts) > 1 and parts[0] in ("logs", "state", "tensorboard")):
        return Want(path, grows=True)
    if len(parts) > 1 and parts[0] == "errors":
        return Want(path, grows=False)
    if ".tfevents." in parts[-1]:
        return Want(f"tensorboard/{path}", grows=True)
    if checkpoints and len(parts) > 1 and parts[0] == "checkpoints":
        return Want(path, grows=False)
    return None


def collect(files: Files, output: str, local: Path, *, checkpoints: bool = False) -> int:
    """Bring over what is new since the last time; how many bytes travelled.

    One at a time for a local folder, over all processes: two that add to the same file would double its bytes.
    """
    moved = 0
    with _alone(local):
        for entry in files.scan(output):
            wanted = want(entry.path, checkpoints=checkpoints)
            if wanted is None:
                continue
            target = local / wanted.local
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                moved += _grow(files, output, entry, target) if wanted.grows else _replace(files, output, entry, target)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue  # another node has a folder of this name, or a file where this one has a folder
    return moved


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / ".collecting").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _grow(files: Files, output: str, entry: FileEntry, target: Path) -> int:
    have = target.stat().st_size if target.exists() else 0
    if entry.size < have:  # not the file we knew: begin again
        target.unlink()
        have = 0
    if entry.size == have:
        return 0
    with target.open("ab") as file:
        return sum(file.write(piece) for piece in _pieces(files, f"{output}/{entry.path}", have, entry.size))


def _replace(files: Files, output: str, entry: FileEntry, target: Path) -> int:
    if target.exists() and (target.stat().st_size, int(target.stat().st_mtime)) == (entry.size, int(entry.mtime)):
        return 0
    temporary = target.with_name(target.name + ".part")
    with temporary.open("wb") as file:
        moved = sum(file.write(piece) for piece in _pieces(files, f"{output}/{entry.path}", 0, entry.size))
    os.utime(temporary, (entry.mtime, entry.mtime))
    temporary.replace(target)
    return moved


def _pieces(files: Files, path: str, start: int, end: int) -> Iterable[bytes]:
    while start < end and (piece := files.read(path, start, min(PIECE, end - start))):
        yield piece
        start += len(piece)
