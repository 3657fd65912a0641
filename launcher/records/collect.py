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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
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
from launcher.node.parallel import run_all_catching
from launcher.records.inherited import NEVER, began, superseded
from launcher.records.masking import Masker
from launcher.records.paths import ASIDE, LAYER, RECORD_FILES, as_shown
from launcher.records.store import NodeOfRun
from launcher.records.wanted import CHECKPOINTS, EVENTS, Want, aside, is_ours, is_programs, want
from launcher.records.workdir import SentCode, in_workdir, is_sent
from launcher.records.writer import NO_MASK, append, replace

_SAME_TIME = 0.0001  # seconds; more than a copy's time differs from the file's, less than those of two writers do
_IGNORED_NAMED = 5  # links, FIFOs and such; a program may make thousands
# in place of what is in a folder that is a link: some path of each kind that is collected
_INSIDE = ("", "/node.log", "/node.json", "/node.attempts", "/file", "/node/file")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # writing any other file fails too


@dataclass(frozen=True)
class OutputFolder:
    """A run's output folder; nodes may share it (a network home, nodes on one machine). inherits: as that of Record."""

    files: Files
    path: str
    nodes: tuple[str, ...]
    inherits: bool = False

    @property
    def node(self) -> str:
        return self.nodes[0] if self.nodes else ""

    def began(self, files: Iterable[FileEntry]) -> float:
        """Return the time before which files of it were inherited. files: all that it has."""
        return began(files) if self.inherits else NEVER


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


def output_folders(
    engines: Mapping[str, Engine], nodes: Iterable[NodeOfRun], *, inherits: bool = False
) -> list[OutputFolder]:
    """Return the output folders, each once. engines: by the node's name in the run."""
    shared: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        shared.setdefault((engines[node.name].host, node.output), []).append(node.name)
    return [OutputFolder(engines[names[0]].files, path, tuple(names), inherits) for (_, path), names in shared.items()]


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
    nodes: Sequence[str] = (),
    replicas: bool = False,
) -> list[Collected | LauncherError]:
    """Copy new data from all folders in parallel; return an error for a folder from which nothing could be copied.

    checkpoints: also copy all that the program wrote. trackers: also copy what experiment trackers wrote. code: the
    files that were sent to the working directory, not copied unless changed; None: unknown. nodes: all of the run, by
    rank; default: those of the folders. replicas: the nodes keep copies of one checkpoint, of which the newest counts.
    If several folders have a file of the same name, that of the first folder has this name here; with `checkpoints`,
    the others are put aside (records.wanted). A growing file that is smaller on the node than here is not changed here.
    What a node has only inherited, and another one's program has written since, is left out.
    """
    limits = read_settings(os.environ).limits
    until = math.inf if checkpoints else time.monotonic() + limits.collect  # the user waits for checkpoints
    nodes = nodes or [node for folder in folders for node in folder.nodes]
    try:
        most = shutil.disk_usage(local).free if checkpoints else limits.file
        few = ("", "") if checkpoints or trackers else (WORKDIR, EVENTS)
        listed = run_all_catching([partial(_list, folder, few) for folder in folders])
        answers = zip(folders, listed, strict=True)
        answered = {n for folder, found in answers if isinstance(found, _Found) for n in folder.nodes}
        plan = _Plan(local, most, nodes, answered, code, checkpoints, trackers, replicas)
        old = superseded([(f.began, f.files) if isinstance(f, _Found) else (NEVER, ()) for f in listed])
        copies: list[Callable[[], Collected]] = []
        for folder, found, paths in zip(folders, listed, old, strict=True):
            chosen = ([], []) if isinstance(found, LauncherError) else plan.choose(folder, found, paths)
            copies.append(partial(_copy, folder, *chosen, mask, until))
        copied = run_all_catching(copies)
    except OSError as error:
        return [_no_room(local, error) for _ in folders]
    pairs = zip(listed, copied, strict=True)
    results = [found if isinstance(found, LauncherError) else done for found, done in pairs]
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


@dataclass(frozen=True)
class _Found:
    """What a folder has. ignored: links, FIFOs and such. problems: of folders in it that cannot be read. began: older
    files were inherited.
    """

    files: Sequence[FileEntry]
    ignored: Sequence[FileEntry]
    problems: Sequence[LauncherError]
    began: float


def _list(folder: OutputFolder, few: tuple[str, str]) -> _Found:
    """few: as for `Files.scan`."""
    problems: list[LauncherError] = []
    ignored: list[FileEntry] = []
    files = folder.files.scan(folder.path, problems.append, few=few, ignored=ignored.append)
    return _Found(files, ignored, problems, folder.began(files))


@dataclass(frozen=True)
class _Plan:
    """Decides which files of several folders are copied, and to which path; the arguments of `collect`, and:

    most: bytes; larger files are left on the node. With `checkpoints`, it is the room on this machine, not a limit of
    the user. answered: nodes whose files are listed.
    """

    local: Path
    most: int
    nodes: Sequence[str]
    answered: Collection[str]
    code: SentCode | None
    checkpoints: bool
    trackers: bool
    replicas: bool
    _taken: dict[Path, FileEntry] = field(default_factory=dict)
    _folders: set[Path] = field(default_factory=set)

    def choose(
        self, folder: OutputFolder, found: _Found, old: Collection[str]
    ) -> tuple[list[_Fetch], list[LauncherError]]:
        """Return the files to copy from the next folder, and errors for the others. old: the result of superseded()."""
        fetches, problems, ignored = [], [*found.problems], []
        for entry in found.files:
            if not self._is_own(entry, folder) or entry.path in old:
                continue
            wanted = want(entry.path, checkpoints=self.checkpoints, trackers=self.trackers)
            if wanted is None and self.checkpoints and is_programs(entry.path):
                ignored.append(f"{entry.path!r} has a name that cannot be used here: ignored")
            fetch = wanted and self._fetch(entry, wanted, folder, found.began)
            if fetch and entry.size > self.most:
                problems.append(self._too_large(entry, folder))
            elif fetch:
                fetches.append(fetch)
        missed = [entry for entry in found.ignored if self._is_missed(entry) and self._is_own(entry, folder)]
        ignored += [f"{entry.path} {entry.ignored}: ignored" for entry in missed]
        problems += [NodeUnfit(folder.node, what) for what in ignored[:_IGNORED_NAMED]]
        if (more := len(ignored) - _IGNORED_NAMED) > 0:
            problems.append(NodeUnfit(folder.node, f"{more} more links and special files in {folder.path} ignored"))
        return fetches, problems

    def _too_large(self, entry: FileEntry, folder: OutputFolder) -> NodeUnfit:
        what = f"{folder.path}/{entry.path} was not copied: it has {entry.size:,} bytes, more than {self.most:,}"
        fix = "free disk space on this machine" if self.checkpoints else "raise limits.file in your settings file"
        return NodeUnfit(folder.node, what, fix)

    def _fetch(self, entry: FileEntry, wanted: Want, folder: OutputFolder, began: float) -> _Fetch | None:
        """Return how to copy a file; None if it is here, or if another node's file stands for it."""
        target = self.local / wanted.local
        first, (size, when) = self._taken.get(target, entry), _here(target)
        if first is not entry and first.size == entry.size and abs(first.mtime - entry.mtime) < _SAME_TIME:
            return None
        if entry.mtime < began <= when:  # inherited, and here is what a node that is not listed now has written
            return None
        newest = max(when, first.mtime if first is not entry else 0.0)
        if self.replicas and entry.path.startswith(f"{CHECKPOINTS}/") and newest >= entry.mtime:
            return None
        if first is entry and self._fits(target):
            self._taken[target] = entry
            self._folders.update(target.parents)
            if wanted.grows and (entry.size >= size or not self.checkpoints):
                return _Fetch(entry, target, max(0, size), wanted) if entry.size > max(0, size) else None
            if not wanted.grows and _same(size, when, entry):
                return None
            if not wanted.grows and (size < 0 or not self._may_be_of_another(folder)):
                return _Fetch(entry, target, 0, wanted)
        if not self.checkpoints or is_ours(entry.path):
            return None
        beside = self.local / aside(entry.path, folder.node)
        if _same(*_here(beside), entry):
            return None
        return _Fetch(entry, beside, 0, Want(aside(entry.path, folder.node), grows=False, text=wanted.text))

    def _fits(self, target: Path) -> bool:
        """Whether a file can be at this path: neither of the record, nor where another one is a folder or in one."""
        above = [parent for parent in target.parents if parent.is_relative_to(self.local)]
        if target.relative_to(self.local).parts[0] in (*RECORD_FILES, ASIDE, LAYER):
            return False
        return (
            target not in self._folders
            and not target.is_dir()
            and not any(parent in self._taken or parent.is_file() for parent in above)
        )

    def _may_be_of_another(self, folder: OutputFolder) -> bool:
        """Whether a file that is here may be of a node that comes before, and is not listed now."""
        before = itertools.takewhile(lambda node: node != folder.node, self.nodes)
        return any(node not in self.answered for node in before)

    def _is_missed(self, entry: FileEntry) -> bool:
        """Whether it would be copied if it were a regular file, or contain such files if it were a folder."""
        return any(want(entry.path + inside, checkpoints=self.checkpoints) for inside in _INSIDE)

    def _is_own(self, entry: FileEntry, folder: OutputFolder) -> bool:
        """Return False for another node's working directory, whose own copy counts, and for unchanged code."""
        node, inside = in_workdir(entry.path, self.nodes)
        kind = "l" if entry.ignored else "f"
        sent = node and is_sent(self.code, inside, entry.size, entry.mtime, kind)
        return not sent and (not node or node in folder.nodes)


def _here(path: Path) -> tuple[int, float]:
    """Return the size and the time of a local file; -1 if there is none."""
    try:
        found = path.stat()
    except OSError:  # also if the name is too long here: writing reports that
        return -1, 0.0
    return found.st_size, found.st_mtime


def _same(size: int, when: float, entry: FileEntry) -> bool:
    return size == entry.size and same_time(when, entry.mtime)


def same_time(here: float, there: float) -> bool:
    """Whether a copy has the time of a file: to a microsecond, or to a second if the disk here has only these."""
    return abs(here - there) < _SAME_TIME or (here.is_integer() and int(here) == int(there))


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
