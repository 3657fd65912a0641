"""What a program wrote to a run's output folder, also to its working directory there, and what of it is only there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.model.sizes import counted, size_text
from launcher.node.files import FileEntry
from launcher.records.collect import same_time
from launcher.records.inherited import NEVER, began
from launcher.records.paths import LAYER
from launcher.records.store import Record
from launcher.records.wanted import CHECKPOINTS, aside, is_of_no_use, is_programs, want
from launcher.records.workdir import SentCode, in_workdir, is_sent, sent_files

_NAMED = 3  # files that a message names, the largest


@dataclass(frozen=True)
class Outside:
    """What the program wrote to its containers' own layers. names: of the largest files; none if they are not listed.

    size: bytes.
    """

    files: int
    size: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        count = f"{counted(self.files, 'file')}, {size_text(self.size)}" if self.names else size_text(self.size)
        return f"{count}, outside the output folder: {_named(self.names) if self.names else 'files not listed'}"

    def kept(self, fetch: str) -> str:
        """Say what becomes of a run's. fetch: the command that brings the files."""
        them, they = ("it", "it goes") if self.files == 1 else ("them", "they go")
        kept = f"{they} with the container, which is kept until {fetch} has brought {them}"
        return f"{self}: {kept}; save below $LAUNCHER_OUTPUT or the working directory"


@dataclass(frozen=True)
class Written:
    """What the program wrote. size: bytes. where: "output folder", "working directory", or both.

    names: of the files, the largest first; a program may write files of the same name on each node. unlisted: why a
    node's files are not included. run: its ID, unless it is the latest run. outside: of these folders.
    """

    files: int
    size: int
    names: tuple[str, ...]
    unlisted: str = ""
    run: str = ""
    where: tuple[str, ...] = ()
    outside: Outside | None = None

    def __str__(self) -> str:
        fetch = f"launcher fetch {self.run and f'{self.run} '}--checkpoints"
        found = []
        if self.unlisted:
            found.append(f"what the program wrote could not be listed: {self.unlisted}")
        elif self.files:
            count, them = ("1 file", "it") if self.files == 1 else (f"{self.files:,} files", "them")
            places = " and ".join(f"its {place}" for place in self.where)
            wrote = f"the program wrote {count} to {places} ({size_text(self.size)}): {_named(self.names)}"
            found.append(f"{wrote}; {fetch} brings {them}")
        if self.outside:
            found.append(self.outside.kept(fetch))
        return ". ".join(found)


def is_written(file: FileEntry, nodes: Collection[str], code: SentCode | None) -> bool:
    """Whether the program wrote a file of an output folder, or changed it. nodes: those of the run."""
    node, inside = in_workdir(file.path, nodes)
    return is_programs(file.path) and not (node and is_sent(code, inside, file.size, file.mtime))


def written_to(files: Sequence[FileEntry], nodes: Collection[str], code: bytes, *, inherits: bool) -> list[FileEntry]:
    """Return the files of an output folder that the program wrote. code: the archive that was sent. inherits: older
    files were copied from an earlier run.
    """
    sent, own = sent_files(code), began(files) if inherits else NEVER
    files = [file for file in files if file.mtime >= own]
    return [file for file in files if file.size and is_written(file, nodes, sent) and not is_of_no_use(file.path)]


def is_another_nodes(path: str, mine: Collection[str], nodes: Collection[str]) -> bool:
    """Whether a file is in the working directory of another node, which shares the folder: its own listing counts."""
    node, _ = in_workdir(path, nodes)
    return node != "" and node not in mine


def summary(files: Iterable[FileEntry], nodes: Collection[str]) -> Written:
    """files: that the program wrote. What several nodes have, as they share it or resumed from it, counts once."""
    known = {(file.path, file.size, int(file.mtime)): file for file in files}
    found = sorted(known.values(), key=lambda file: file.size, reverse=True)
    placed = [(file, *in_workdir(file.path, nodes)) for file in found]
    names = dict.fromkeys(name for file, _, inside in placed if (name := inside or file.path).isprintable())
    beside = {bool(node) for _, node, _ in placed}
    where = [place for at, place in ((False, "output folder"), (True, "working directory")) if at in beside]
    return Written(len(found), sum(f.size for f in found), tuple(names)[: _NAMED + 1], where=tuple(where))


def unfetched(files: Iterable[FileEntry], record: Record | None) -> list[FileEntry]:
    """Return the files of a run's output folder (paths relative to it) that are only there, as far as is known.

    Empty files, the sent code and what is of no use without the run do not count. record: the run's, or None if another
    folder has started it; then it is only known which files every launcher collects at the end of a run.
    """
    nodes = {node.name for node in record.nodes()} if record else {}
    left, files = [], list(files)
    own = began(files) if record and record.inherits else NEVER
    for file in files:
        node, inside = in_workdir(file.path, nodes)
        sent = node and is_sent(record.sent_code if record else None, inside, file.size, file.mtime)
        if is_of_no_use(file.path) or sent or not file.size:
            continue
        if not is_here(file, record, own) if record else want(file.path) is None:
            left.append(file)
    return left


def is_here(file: FileEntry, record: Record, own: float = NEVER) -> bool:
    """Whether a file of the output folder was collected completely, by any `fetch` of this folder.

    own: when the run began, if files may be inherited: for an older one stands what the program has written since.
    """
    wanted = want(file.path, checkpoints=True, trackers=True)
    if wanted is None:
        return False
    replica = bool(record.min_nodes) and file.path.startswith(f"{CHECKPOINTS}/")
    copies = [aside(file.path, node.name) for node in record.nodes()]
    return any(
        _same(place / wanted.local, file, grows=wanted.grows, replica=replica, own=own)
        or any(_same(place / copy, file) for copy in copies)
        for place in (record.paths.root, *record.fetched_to())
    )


def _same(here: Path, file: FileEntry, *, grows: bool = False, replica: bool = False, own: float = NEVER) -> bool:
    """replica: with min_nodes, the nodes keep copies of one checkpoint: one that is not older stands for all. own: as
    for `is_here`.
    """
    try:
        found = here.stat()
    except (OSError, ValueError):
        return False
    if (replica and found.st_mtime >= file.mtime) or file.mtime < own <= found.st_mtime:
        return True
    return found.st_size == file.size and (grows or same_time(found.st_mtime, file.mtime))


def left_outside(files: Iterable[FileEntry], node: str, folders: Iterable[Path]) -> list[FileEntry]:
    """Return the files of a node's container (Engine.grown) that no folder has to which runs are fetched."""
    places = [folder / LAYER / node for folder in folders]
    return [f for f in files if not f.path or not any(_same(place / f.path.lstrip("/"), f) for place in places)]


def outside(files: Sequence[FileEntry]) -> Outside | None:
    """files: of all containers (Engine.grown)."""
    found = sorted(files, key=lambda file: file.size, reverse=True)
    names = dict.fromkeys(file.path for file in found if file.path and file.path.isprintable())
    return Outside(len(found), sum(f.size for f in found), tuple(names)[: _NAMED + 1]) if found else None


def not_fetched(files: Sequence[FileEntry]) -> str:
    """Return `NOT FETCHED: 2 files, 3 MB, such as checkpoints/last.pt`."""
    largest = max(files, key=lambda file: file.size)
    size = size_text(sum(file.size for file in files))
    if not largest.path:
        return f"NOT FETCHED: {size}, files not listed"
    return f"NOT FETCHED: {counted(len(files), 'file')}, {size}, such as {largest.path}"


def _named(names: Sequence[str]) -> str:
    return ", ".join([*names[:_NAMED], *(["..."] if len(names) > _NAMED else [])])
