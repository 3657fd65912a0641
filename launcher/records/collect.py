"""Copy a run's files from its nodes to the caller. Of files that grow, only new bytes are transferred.

The size of the local file is the offset to resume from, so any launcher can continue after another one was killed.
Several launchers may collect and follow a run at the same time: see launcher.records.writer.
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

from launcher.elastic import generations
from launcher.errors import LauncherError, NodeUnfit, NodeUnreachable, NoRoomHere
from launcher.extras import in_words
from launcher.faults import disk
from launcher.job.settings import read_settings
from launcher.model.container import WORKDIR
from launcher.node.engine import Engine
from launcher.node.files import FileEntry, Files, Span
from launcher.node.parallel import run_all_settled
from launcher.records.masking import Masker
from launcher.records.paths import as_shown
from launcher.records.store import NodeOfRun
from launcher.records.wanted import EVENTS, Want, want
from launcher.records.workdir import SentCode, is_sent
from launcher.records.writer import NO_MASK, append, replace

_IGNORED_NAMED = 5  # links, FIFOs and such; a program may make thousands
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # writing any other file fails too


@dataclass(frozen=True)
class OutputFolder:
    """A run's output folder; nodes may share it (a network home, nodes on one machine)."""

    files: Files
    path: str
    nodes: tuple[str, ...]

    @property
    def node(self) -> str:
        return self.nodes[0] if self.nodes else ""


@dataclass(frozen=True)
class _Fetch:
    """A file to copy: from `offset` if it grows, else completely."""

    entry: FileEntry
    target: Path
    offset: int
    wanted: Want

    def write(self, pieces: Iterable[bytes], mask: Masker) -> int:
        """Return the number of bytes written. On failure a growing file keeps these, any other file is unchanged."""
        mask = mask if self.wanted.text else NO_MASK
        if not self.wanted.grows:
            return replace(self.target, pieces, self.entry.mtime, mask)
        reached = self.offset
        for piece in pieces:
            if not append(self.target, reached, piece, mask):  # removed here in the meantime: start again next time
                break
            reached += len(piece)
        return reached - self.offset


def output_folders(engines: Mapping[str, Engine], nodes: Iterable[NodeOfRun]) -> list[OutputFolder]:
    """Return the output folders, each once. engines: by the node's name in the run."""
    shared: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        shared.setdefault((engines[node.name].host, node.output), []).append(node.name)
    return [OutputFolder(engines[names[0]].files, path, tuple(names)) for (_, path), names in shared.items()]


@dataclass(frozen=True)
class Collected:
    """Result for one folder: the number of bytes copied, and the reason for each file that could not be copied."""

    moved: int
    problems: tuple[LauncherError, ...] = ()


def collect(
    folders: Sequence[OutputFolder],
    local: Path,
    *,
    mask: Masker = NO_MASK,
    checkpoints: bool = False,
    trackers: bool = False,
    code: SentCode | None = None,
) -> list[Collected | LauncherError]:
    """Copy new data from all folders in parallel; return an error for a folder from which nothing could be copied.

    checkpoints: also copy them, and what the program wrote to its working directory. trackers: also copy what
    experiment trackers wrote. code: the files that were sent to the working directory, not copied unless changed.
    If several folders have a file of the same name, that of the first folder is copied. A growing file that is smaller
    on the node than here is not changed here.
    """
    limits = read_settings(os.environ).limits
    until = math.inf if checkpoints else time.monotonic() + limits.collect  # the user waits for checkpoints
    try:
        most = shutil.disk_usage(local).free if checkpoints else limits.file
        choose = partial(want, checkpoints=checkpoints, trackers=trackers)
        few = ("", "") if checkpoints or trackers else (WORKDIR, EVENTS)
        planned = partial(_plan, local=local, most=most, choose=choose, few=few, whole=checkpoints, code=code or {})
        plans = run_all_settled([partial(planned, folder) for folder in folders])
        taken: set[Path] = set()
        copies: list[Callable[[], Collected]] = []
        for folder, plan in zip(folders, plans, strict=True):
            fetches, problems = ([], []) if isinstance(plan, LauncherError) else plan
            mine = [fetch for fetch in fetches if fetch.target not in taken]
            taken |= {fetch.target for fetch in mine}
            copies.append(partial(_copy, folder, mine, problems, mask, until))
        copied = run_all_settled(copies)
    except OSError as error:
        return [_no_room(local, error) for _ in folders]
    results = [plan if isinstance(plan, LauncherError) else done for plan, done in zip(plans, copied, strict=True)]
    problems = _join_curves(local)
    for index, result in enumerate(results):
        if isinstance(result, Collected):  # said once
            results[index] = Collected(result.moved, (*result.problems, *problems))
            break
    return results


def _join_curves(local: Path) -> list[LauncherError]:
    """Join the curves of a job with min_nodes; return the error if that failed: their files are here all the same."""
    try:
        if (local / generations.GENERATIONS).is_dir():
            generations.join(local)
    except Exception as error:  # noqa: BLE001 - said
        if isinstance(error, OSError) and disk.is_full(error):
            return [_no_room(local, error)]
        what = f"the curves in {as_shown(local / generations.GENERATIONS)} could not be joined: {in_words(error)}"
        return [NodeUnfit("this machine", what, "later, run: launcher fetch")]
    return []


def _plan(
    folder: OutputFolder,
    *,
    local: Path,
    most: int,
    choose: Callable[[str], Want | None],
    few: tuple[str, str],
    whole: bool,
    code: SentCode,
) -> tuple[list[_Fetch], list[LauncherError]]:
    """Return the files to copy, and errors for the others.

    most: bytes; larger files are left on the node. choose: says how to copy a file. few: as for `Files.scan`. whole:
    `most` is the room on this machine, not a limit of the user.
    """
    fetches: list[_Fetch] = []
    problems: list[LauncherError] = []
    ignored: list[FileEntry] = []
    for entry in folder.files.scan(folder.path, problems.append, few=few, ignored=ignored.append):
        wanted = choose(entry.path)
        if wanted is None or not _is_own(entry, folder, code):
            continue
        target = local / wanted.local
        try:
            here = target.stat()
            size, when = here.st_size, int(here.st_mtime)
        except OSError:  # also if the name is too long here: writing reports that
            size, when = -1, 0
        if entry.size <= max(0, size) if wanted.grows else (entry.size, int(entry.mtime)) == (size, when):
            continue
        if entry.size > most:
            what = f"{folder.path}/{entry.path} was not copied: it has {entry.size:,} bytes, more than {most:,}"
            fix = "raise limits.file in your settings file" if not whole else "free disk space on this machine"
            problems.append(NodeUnfit(folder.node, what, fix))
        else:
            fetches.append(_Fetch(entry, target, max(0, size) if wanted.grows else 0, wanted))
    missed = [entry for entry in ignored if _is_missed(entry, whole) and _is_own(entry, folder, code)]
    problems += [NodeUnfit(folder.node, f"{entry.path} {entry.ignored}: ignored") for entry in missed[:_IGNORED_NAMED]]
    if (more := len(missed) - _IGNORED_NAMED) > 0:
        problems.append(NodeUnfit(folder.node, f"{more} more links and special files in {folder.path} ignored"))
    return fetches, problems


def _is_missed(entry: FileEntry, checkpoints: bool) -> bool:
    """Return whether it would be copied if it were a regular file, or contain such files if it were a folder."""
    return any(want(entry.path + inside, checkpoints=checkpoints) for inside in ("", "/file", "/node/file"))


def _is_own(entry: FileEntry, folder: OutputFolder, code: SentCode) -> bool:
    """Return False for another node's working directory, whose own copy counts, and for unchanged files of the code."""
    top, _, rest = entry.path.partition("/")
    node, _, path = rest.partition("/")
    kind = "l" if entry.ignored else "f"
    return top != WORKDIR or (node in folder.nodes and not is_sent(code, path, entry.size, entry.mtime, kind))


def _copy(
    folder: OutputFolder, wanted: Sequence[_Fetch], problems: list[LauncherError], mask: Masker, until: float
) -> Collected:
    """Copy file by file; a file that cannot be read or written does not affect the others.

    Raises NodeUnreachable, NoRoomHere.
    """
    fetches = {Span(f"{folder.path}/{f.entry.path}", f.offset, f.entry.size - f.offset): f for f in wanted}
    left, moved = list(fetches), 0
    unread = {span for span in fetches if span.length}
    while left:
        now = None
        try:
            with closing(folder.files.read_spans(left, below=folder.path)) as pieces:
                for now, group in itertools.groupby(_timed(pieces, until, folder.node), key=itemgetter(0)):
                    unread.discard(now)
                    try:
                        moved += fetches[now].write((piece for _, piece in group), mask)
                    except (FileExistsError, NotADirectoryError, IsADirectoryError):
                        continue  # another node has a folder and this one a file of this name, or vice versa
                    except OSError as error:
                        if error.errno in _FULL:
                            return Collected(moved, (*problems, _no_room(fetches[now].target, error)))
                        what = f"{now.path} could not be written here: {error.strerror}"
                        problems.append(NodeUnfit(folder.node, what))
            break
        except NodeUnfit as error:
            if now is None:
                raise
            problems.append(error)  # changed or removed while it was read: continue with the next file
            unread.discard(now)
            left = left[left.index(now) + 1 :]
    missing = [
        NodeUnfit(folder.node, f"{span.path} could not be read or was removed") for span in fetches if span in unread
    ]
    return Collected(moved, (*problems, *missing))


def _timed(pieces: Iterable[tuple[Span, bytes]], until: float, node: str) -> Iterator[tuple[Span, bytes]]:
    for piece in pieces:
        yield piece
        if time.monotonic() > until:
            fix = "check its network and disk, or raise limits.collect in your settings file"
            raise NodeUnreachable(node, "copying its files timed out", fix)


def _no_room(target: Path, error: OSError) -> NoRoomHere:
    if disk.is_full(error):
        found = disk.full(f"the disk of {as_shown(target)}", error)
        return NoRoomHere("this machine", found.what, "free some space there, then run: launcher fetch")
    return NoRoomHere(
        "this machine", f"could not write {as_shown(target)}: {error.strerror}", "later, run: launcher fetch"
    )
