"""Copies a run's files from its nodes to the caller. Of append-only files only the new bytes travel.

The local file's size says what is here already, so after a kill any launcher continues where the last one stopped.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from launcher.errors import LauncherError, NodeUnfit, NodeUnreachable, NoRoomHere
from launcher.job.settings import read_settings
from launcher.node.engine import Engine
from launcher.node.files import FileEntry, Files, Span
from launcher.node.parallel import run_all_settled
from launcher.records import generations
from launcher.records.masking import Masker
from launcher.records.paths import GENERATIONS
from launcher.records.store import NodeOfRun

RECORDINGS = "flight_recorder"  # the folder of what ranks that hang write down (container_scripts/flight_recorder.py)
_NOTHING = Masker()
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no other file can be written either


@dataclass(frozen=True)
class Want:
    """Where a file of the output folder goes below the local folder.

    grows: only ever. text: secrets are masked in it; in TensorBoard's files, which have checksums, and in checkpoints
    it would destroy them.
    """

    local: str
    grows: bool
    text: bool = False


@dataclass(frozen=True)
class OutputFolder:
    """A run's output folder; nodes that share it (a network home, nodes on one machine) have one."""

    files: Files
    path: str
    nodes: tuple[str, ...]

    @property
    def node(self) -> str:
        return self.nodes[0] if self.nodes else ""


@dataclass(frozen=True)
class _Fetch:
    """One file to copy: from `offset` to the size in the listing, appended where it grows."""

    entry: FileEntry
    target: Path
    offset: int
    wanted: Want

    def write(self, pieces: Iterable[bytes], mask: Masker) -> int:
        """Bytes that were written; where that fails the file is as it was before."""
        mask = mask if self.wanted.text else _NOTHING
        path = self.target if self.wanted.grows else self.target.with_name(self.target.name + ".part")
        try:
            with _open(path) as file:
                file.truncate(self.offset)
                file.seek(self.offset)
                try:
                    moved = sum(_write(file, piece, mask) for piece in pieces)
                except BaseException:
                    file.truncate(self.offset)
                    raise
            if path != self.target:
                os.utime(path, (self.entry.mtime, self.entry.mtime))
                path.replace(self.target)
        finally:
            if path != self.target:
                path.unlink(missing_ok=True)
        return moved


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


def output_folders(engines: Mapping[str, Engine], nodes: Iterable[NodeOfRun]) -> list[OutputFolder]:
    """Each folder once. engines: by the node's name in the run."""
    shared: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        shared.setdefault((engines[node.name].host, node.output), []).append(node.name)
    return [OutputFolder(engines[names[0]].files, path, tuple(names)) for (_, path), names in shared.items()]


@dataclass(frozen=True)
class Collected:
    """Of one folder: bytes that travelled, and the files that did not, each with its reason."""

    moved: int
    problems: tuple[LauncherError, ...] = ()


def collect(
    folders: Sequence[OutputFolder], local: Path, *, mask: Masker = _NOTHING, checkpoints: bool = False
) -> list[Collected | LauncherError]:
    """Copy what is new since the last time, from all folders at once; an error where nothing of a folder could be.

    One process and thread at a time for a local folder: two that append to the same file would double its bytes. Of
    files with one name in several folders, the first folder's is copied.
    """
    limits = read_settings(os.environ).limits
    until = math.inf if checkpoints else time.monotonic() + limits.collect  # the user waits for checkpoints
    try:
        most = shutil.disk_usage(local).free if checkpoints else limits.file
        with _locked(local):
            looks = [partial(_plan, folder, local, most, checkpoints=checkpoints) for folder in folders]
            plans = run_all_settled(looks)
            taken: set[Path] = set()
            copies: list[Callable[[], Collected]] = []
            for folder, plan in zip(folders, plans, strict=True):
                fetches, problems = ([], []) if isinstance(plan, LauncherError) else plan
                mine = [fetch for fetch in fetches if fetch.target not in taken]
                taken |= {fetch.target for fetch in mine}
                copies.append(partial(_copy, folder, mine, problems, mask, until))
            copied = run_all_settled(copies)
            if (local / GENERATIONS).is_dir():
                generations.join(local)
    except OSError as error:
        return [_no_room(local, error) for _ in folders]
    return [plan if isinstance(plan, LauncherError) else done for plan, done in zip(plans, copied, strict=True)]


def append(
    local: Path, relative: str, offset: int, data: bytes, mask: Masker = _NOTHING, most: float = math.inf
) -> bool:
    """Add what was followed to its local file if that has all bytes before `offset`; False: try again later.

    What is beyond `most` bytes stays on the node, as collect() reports."""
    if offset + len(data) > most:
        return True
    with _locked(local, wait=False) as mine:
        if not mine:
            return False
        target = local / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        with _open(target) as file:
            here = file.seek(0, os.SEEK_END)
            if 0 <= here - offset < len(data):
                _write(file, data[here - offset :], mask)
            return here >= offset


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


def _plan(
    folder: OutputFolder, local: Path, most: int, *, checkpoints: bool
) -> tuple[list[_Fetch], list[LauncherError]]:
    """What is new in a folder, to be copied, and what of it cannot be. most: bytes; a larger file stays where it is."""
    fetches: list[_Fetch] = []
    problems: list[LauncherError] = []
    for entry in folder.files.scan(folder.path, problems.append):
        wanted = want(entry.path, checkpoints=checkpoints)
        if wanted is None:
            continue
        target = local / wanted.local
        try:
            here = target.stat()
            size, when = here.st_size, int(here.st_mtime)
        except OSError:  # also a name that is too long here: writing it tells
            size, when = -1, 0
        if (entry.size == max(0, size)) if wanted.grows else ((entry.size, int(entry.mtime)) == (size, when)):
            continue
        if entry.size > most:
            what = f"{folder.path}/{entry.path} has {entry.size:,} bytes and was left there"
            cure = "limits.file of your settings file" if not checkpoints else "make room here"
            problems.append(NodeUnfit(folder.node, what, f"the limit is {most:,}: {cure}"))
        else:  # a file that should grow and is smaller is another one than that here
            offset = size if wanted.grows and entry.size > size >= 0 else 0
            fetches.append(_Fetch(entry, target, offset, wanted))
    return fetches, problems


def _copy(
    folder: OutputFolder, wanted: Sequence[_Fetch], problems: list[LauncherError], mask: Masker, until: float
) -> Collected:
    """Copy file by file; one that cannot be read or written costs no other one, and is as it was before.

    Raises NodeUnreachable, NoRoomHere.
    """
    fetches = {Span(f"{folder.path}/{f.entry.path}", f.offset, f.entry.size - f.offset): f for f in wanted}
    left, moved = list(fetches), 0
    unread = {span for span in fetches if span.length}
    while left:
        now = None
        try:
            with closing(folder.files.read_spans(left)) as pieces:
                for now, group in itertools.groupby(_timed(pieces, until, folder.node), key=itemgetter(0)):
                    unread.discard(now)
                    try:
                        fetches[now].target.parent.mkdir(parents=True, exist_ok=True)
                        moved += fetches[now].write((piece for _, piece in group), mask)
                    except (FileExistsError, NotADirectoryError, IsADirectoryError):
                        continue  # another node has a folder of this name, or a file where this one has a folder
                    except OSError as error:
                        if error.errno in _FULL:
                            return Collected(moved, (*problems, _no_room(fetches[now].target, error)))
                        what = f"{now.path} could not be written here: {error.strerror}"
                        problems.append(NodeUnfit(folder.node, what))
            break
        except NodeUnfit as error:
            if now is None:
                raise
            problems.append(error)  # it was changed or removed while it was read: the others are asked for again
            unread.discard(now)
            left = left[left.index(now) + 1 :]
    gone = [NodeUnfit(folder.node, f"{span.path} could not be read, or is gone") for span in fetches if span in unread]
    return Collected(moved, (*problems, *gone))


def _timed(pieces: Iterable[tuple[Span, bytes]], until: float, node: str) -> Iterator[tuple[Span, bytes]]:
    for piece in pieces:
        yield piece
        if time.monotonic() > until:
            cure = "is its network or disk slow? raise limits.collect of your settings file"
            raise NodeUnreachable(node, "its files did not come in time", cure)


def _open(target: Path) -> BinaryIO:
    """To be read and written, made where it is missing."""
    return os.fdopen(os.open(target, os.O_RDWR | os.O_CREAT, 0o600), "r+b")


def _write(file: BinaryIO, data: bytes, mask: Masker) -> int:
    """Add data at the file's place. A secret may begin in what is there: that much is read again and masked with it.

    Bytes that were added.
    """
    offset = file.tell()
    again = min(offset, max(0, mask.longest - 1))
    file.seek(offset - again)
    masked = mask.in_place(file.read(again) + data) if mask.longest else data
    file.seek(offset - again)
    file.write(masked)
    return len(data)


def _no_room(target: Path, error: OSError) -> NoRoomHere:
    return NoRoomHere("this machine", f"could not write {target}: {error.strerror}", "make room, then: launcher fetch")
