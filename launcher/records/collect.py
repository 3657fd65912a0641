"""Copies a run's files from its nodes to the caller. Of files that grow only the new bytes travel.

The local file's size says what is here already, so after a kill any launcher continues where the last one stopped.
Several may collect at once, and follow the run meanwhile: see launcher.records.writer.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

from launcher.errors import LauncherError, NodeUnfit, NodeUnreachable, NoRoomHere
from launcher.job.settings import read_settings
from launcher.node.engine import Engine
from launcher.node.files import FileEntry, Files, Span
from launcher.node.parallel import run_all_settled
from launcher.records import generations
from launcher.records.masking import Masker
from launcher.records.paths import GENERATIONS
from launcher.records.store import NodeOfRun
from launcher.records.wanted import Want, want
from launcher.records.writer import NO_MASK, append, replace

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no other file can be written either


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
    """One file to copy: what it has from `offset` on where it grows, else all of it."""

    entry: FileEntry
    target: Path
    offset: int
    wanted: Want

    def write(self, pieces: Iterable[bytes], mask: Masker) -> int:
        """Bytes that came. Where that fails, a file that grows has those that came before, another is as it was."""
        mask = mask if self.wanted.text else NO_MASK
        if not self.wanted.grows:
            return replace(self.target, pieces, self.entry.mtime, mask)
        reached = self.offset
        for piece in pieces:
            if not append(self.target, reached, piece, mask):  # it was removed here meanwhile: from its start next time
                break
            reached += len(piece)
        return reached - self.offset


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
    folders: Sequence[OutputFolder], local: Path, *, mask: Masker = NO_MASK, checkpoints: bool = False
) -> list[Collected | LauncherError]:
    """Copy what is new since the last time, from all folders at once; an error where nothing of a folder could be.

    Of files with one name in several folders, the first folder's is copied. One that grows and is smaller on the node
    than here stays as it is here.
    """
    limits = read_settings(os.environ).limits
    until = math.inf if checkpoints else time.monotonic() + limits.collect  # the user waits for checkpoints
    try:
        most = shutil.disk_usage(local).free if checkpoints else limits.file
        plans = run_all_settled([partial(_plan, folder, local, most, checkpoints=checkpoints) for folder in folders])
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
        if entry.size <= max(0, size) if wanted.grows else (entry.size, int(entry.mtime)) == (size, when):
            continue
        if entry.size > most:
            what = f"{folder.path}/{entry.path} has {entry.size:,} bytes and was left there"
            fix = "limits.file of your settings file" if not checkpoints else "make room here"
            problems.append(NodeUnfit(folder.node, what, f"the limit is {most:,}: {fix}"))
        else:
            fetches.append(_Fetch(entry, target, max(0, size) if wanted.grows else 0, wanted))
    return fetches, problems


def _copy(
    folder: OutputFolder, wanted: Sequence[_Fetch], problems: list[LauncherError], mask: Masker, until: float
) -> Collected:
    """Copy file by file; one that cannot be read or written costs no other one.

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
            fix = "is its network or disk slow? raise limits.collect of your settings file"
            raise NodeUnreachable(node, "its files did not come in time", fix)


def _no_room(target: Path, error: OSError) -> NoRoomHere:
    return NoRoomHere("this machine", f"could not write {target}: {error.strerror}", "make room, then: launcher fetch")
