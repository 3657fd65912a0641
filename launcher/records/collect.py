"""Copies a run's files from its nodes to the caller. Of append-only files only the new bytes travel.

The local file's size says what is here already, so after a kill any launcher continues where the last one stopped.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path, PurePosixPath

from launcher.errors import LauncherError, NodeUnfit
from launcher.node.engine import Engine
from launcher.node.files import FileEntry, Files, Span
from launcher.node.parallel import run_all_settled
from launcher.records.store import NodeOfRun


@dataclass(frozen=True)
class Want:
    """Where a file of the output folder goes below the local folder, and whether it only ever grows."""

    local: str
    grows: bool


@dataclass(frozen=True)
class OutputFolder:
    """A run's output folder; nodes that share it (a network home, nodes on one machine) have one."""

    files: Files
    path: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class _Fetch:
    """One file to copy: from `offset` to the size in the listing, appended where it grows."""

    entry: FileEntry
    target: Path
    offset: int
    grows: bool


def want(path: str, *, checkpoints: bool = False) -> Want | None:
    """What to do with the file at `path`, relative to the output folder; None: leave it there.

    The path comes from a node, so it is not trusted: one that would leave the local folder is ignored.
    """
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or parts[0] == "/" or "\\" in path or not path.isprintable():
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


def output_folders(engines: Mapping[str, Engine], nodes: Iterable[NodeOfRun]) -> list[OutputFolder]:
    """Each folder once. engines: by the node's name in the run."""
    shared: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        shared.setdefault((engines[node.name].host, node.output), []).append(node.name)
    return [OutputFolder(engines[names[0]].files, path, tuple(names)) for (_, path), names in shared.items()]


def collect(folders: Sequence[OutputFolder], local: Path, *, checkpoints: bool = False) -> list[int | LauncherError]:
    """Copy what is new since the last time, from all folders at once: bytes that travelled, or why none did.

    One process and thread at a time for a local folder: two that append to the same file would double its bytes. Of
    files with one name in several folders, the first folder's is copied.
    """
    with _locked(local):
        listings = run_all_settled([partial(folder.files.scan, folder.path) for folder in folders])
        taken: set[Path] = set()
        plans: list[list[_Fetch]] = []
        for listing in listings:
            found = [] if isinstance(listing, LauncherError) else _plan(listing, local, checkpoints=checkpoints)
            plans.append([fetch for fetch in found if fetch.target not in taken])
            taken |= {fetch.target for fetch in found}
        copied = run_all_settled([partial(_copy, *pair) for pair in zip(folders, plans, strict=True)])
    return [
        listing if isinstance(listing, LauncherError) else moved
        for listing, moved in zip(listings, copied, strict=True)
    ]


def append(local: Path, relative: str, offset: int, data: bytes) -> None:
    """Add what was followed to its local file if that has all bytes before `offset`; else collect() will copy it."""
    with _locked(local, wait=False) as mine:
        if not mine:
            return
        target = local / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as file:
            done = file.tell() - offset
            if 0 <= done < len(data):
                file.write(data[done:])


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[bool]:
    """Whether the lock was taken; always so with wait."""
    with (folder / ".collecting").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True


def _plan(listing: Sequence[FileEntry], local: Path, *, checkpoints: bool) -> list[_Fetch]:
    """What of a listing is new here."""
    found = []
    for entry in listing:
        wanted = want(entry.path, checkpoints=checkpoints)
        if wanted is None:
            continue
        target = local / wanted.local
        here = target.stat() if target.is_file() else None
        size = here.st_size if here else 0
        if wanted.grows and entry.size != size:
            # a smaller one is another file than the one here
            found.append(_Fetch(entry, target, size if entry.size > size else 0, grows=True))
        elif not wanted.grows and (here is None or (size, int(here.st_mtime)) != (entry.size, int(entry.mtime))):
            found.append(_Fetch(entry, target, 0, grows=False))
    return found


def _copy(folder: OutputFolder, plan: Sequence[_Fetch]) -> int:
    """Bytes that were written. Raises LauncherError; a file that is not whole by then is as it was before."""
    fetches = {Span(f"{folder.path}/{f.entry.path}", f.offset, f.entry.size - f.offset): f for f in plan}
    moved = 0
    with closing(folder.files.read_spans(list(fetches))) as pieces:
        for span, group in itertools.groupby(pieces, key=itemgetter(0)):
            fetch = fetches[span]
            try:
                fetch.target.parent.mkdir(parents=True, exist_ok=True)
                moved += (_append if fetch.grows else _replace)(fetch, (piece for _, piece in group))
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue  # another node has a folder of this name, or a file where this one has a folder
            except OSError as error:
                what = f"could not write {fetch.target}: {error.strerror}"
                raise NodeUnfit("this machine", what, "make room, then: launcher fetch") from error
    return moved


def _append(fetch: _Fetch, pieces: Iterable[bytes]) -> int:
    with fetch.target.open("ab") as file:
        file.truncate(fetch.offset)
        try:
            return sum(file.write(piece) for piece in pieces)
        except BaseException:
            file.truncate(fetch.offset)
            raise


def _replace(fetch: _Fetch, pieces: Iterable[bytes]) -> int:
    temporary = fetch.target.with_name(fetch.target.name + ".part")
    try:
        with temporary.open("wb") as file:
            moved = sum(file.write(piece) for piece in pieces)
        os.utime(temporary, (fetch.entry.mtime, fetch.entry.mtime))
        temporary.replace(fetch.target)
    finally:
        temporary.unlink(missing_ok=True)
    return moved
