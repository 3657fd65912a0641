"""What a run's program has left to be resumed from: which machine has which files, and the newest checkpoint.

They are on the run's nodes, or were fetched to this machine.
"""

from __future__ import annotations

import math
import posixpath
import time
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath

from launcher.elastic.generations import GENERATIONS
from launcher.local_files import open_regular
from launcher.model.container import WORKDIR
from launcher.model.sizes import size_text
from launcher.node import trees
from launcher.node.connect import LOCAL
from launcher.node.engine import Engine
from launcher.node.files import Files, Span
from launcher.node.machine import PIECE, LocalMachine
from launcher.node.parallel import run_all_catching
from launcher.node.trees import Entry, NodeClock
from launcher.records.inherited import began
from launcher.records.paths import ASIDE, LAYER, RECORD_FILES
from launcher.records.store import NodeOfRun, Record
from launcher.records.wanted import CHECKPOINTS, is_programs, is_safe, is_saved
from launcher.records.workdir import in_workdir, is_sent
from launcher.run.locate import Attached

_LATE = 2.0  # seconds; times are rounded, and a clock may be adjusted slowly
LOGS = (".log", ".out", ".err")
EVENTS = ".tfevents."  # curves: on every node they would be shown once for each


@dataclass(frozen=True)
class Holder:
    """Files of the earlier run in a folder below its output folder. ranks: of its processes there. clock: the node's.

    began: when the run began there, by the node's clock: older files were inherited, as a copy keeps its time. fetched:
    copies on this machine, with the ranks of the nodes that they stand in for.
    """

    name: str
    host: str
    ranks: frozenset[int]
    files: Files = field(compare=False)
    output: str
    folder: str
    entries: dict[str, Entry] = field(compare=False)
    fetched: bool = False
    clock: NodeClock = field(default=NodeClock(), compare=False)
    began: float = -math.inf

    @property
    def newest(self) -> Entry | None:
        """The file that was written last; None if there are only logs."""
        return newest(self.entries.values())

    def written(self, entry: Entry | None) -> float:
        """Return when a file was written, by this machine's clock: not after now, whatever its time is. None: never."""
        return min(entry.mtime - self.clock.offset, self.clock.read) if entry else -math.inf

    @property
    def of_the_future(self) -> Sequence[str]:
        """Files that were written after now, by the node's own clock."""
        late = self.clock.offset + self.clock.read + _LATE
        return [path for path, entry in self.entries.items() if entry.mtime > late and not is_log(entry)]

    def copy(self, entry: Entry, other: Holder) -> Entry | None:
        """Return the other one's copy of a file."""
        there, shift = other.entries.get(entry.path), self.clock.shift(other.clock)
        error = self.clock.error + other.clock.error + 0.001 if shift else 0.001
        return there if there and (entry.same(there) or entry.same(there, shift, error)) else None


def newest(entries: Iterable[Entry]) -> Entry | None:
    """Return the file that was written last, without logs."""
    return max((entry for entry in entries if not is_log(entry)), key=lambda entry: entry.mtime, default=None)


def is_log(entry: Entry) -> bool:
    """Whether the time of a file says nothing about a checkpoint: a log, curves, a link."""
    return bool(entry.link) or entry.path.endswith(LOGS) or EVENTS in entry.path


@dataclass(frozen=True)
class Listing:
    """The files of the earlier run's output folder on a machine, their paths relative to it."""

    engine: Engine
    output: str
    entries: Sequence[Entry]
    clock: NodeClock

    @property
    def began(self) -> float:
        """When the folder was made, before the run started."""
        return began(self.entries)


class _Fetched(Files):
    """The files of runs/, read without a script: this machine may run another system than the nodes."""

    def read_spans(self, spans: Sequence[Span], *, below: str) -> Generator[tuple[Span, bytes], None, None]:  # noqa: ARG002
        for span in spans:
            with suppress(OSError), open_regular(span.path) as file:
                file.seek(span.offset)
                left = span.length
                while left and (piece := file.read(min(left, PIECE))):
                    left -= len(piece)
                    yield span, piece


def checkpoint_of(attached: Attached, *, workdirs: bool = True, own: bool = False) -> str:
    """Return the newest checkpoint that a run left on its reachable nodes, as text; "" if none was found.

    Outside of checkpoints/ in the output folder, and in the working directories (if workdirs), that is a file whose
    name says so. own: not one that the run has inherited.
    """
    record = attached.record
    on = {(attached.engines[node.name].host, node.output): attached.engines[node.name] for node in attached.nodes}
    listed = run_all_catching([partial(listing, engine, output) for (_, output), engine in on.items()])
    known = [each for each in listed if isinstance(each, Listing)]
    holders = [*(working_directories(known, record) if workdirs else []), *outputs(known, record)]
    found = [
        (path, (each, entry))
        for each in holders
        for path, entry in each.entries.items()
        if is_saved(path) and not is_log(entry) and (entry.mtime >= each.began or not own)
    ]
    path, last = max(found, key=when, default=("", None))
    if last is None:
        return ""
    holder, entry = last
    return f"{path} (in {holder.folder} on {holder.name}, {moment(holder, entry)}, {size_text(entry.size)})"


def listing(engine: Engine, output: str) -> Listing:
    return Listing(engine, output, *trees.entries(engine.files, output))


def outputs(listed: Sequence[Listing], old: Record) -> list[Holder]:
    """Return who has files of the output folder: the nodes, by machine, and this machine for nodes that have none."""
    found = []
    for each in listed:
        at = [node for node in old.nodes() if node.host == each.engine.host]
        if entries := whole(entry for entry in each.entries if _is_output(entry.path, _nodes(each, old))):
            name, engine = next((node.name for node in at), each.engine.node), each.engine
            rest = (_ranks(at), engine.files, each.output, each.output, entries)
            found.append(Holder(name, engine.host, *rest, clock=each.clock, began=each.began))
    missing = [node for node in old.nodes() if node.host not in {holder.host for holder in found}]
    root = old.paths.root
    beside = [_fetched(old, root / ASIDE / node.name, _ranks([node])) for node in missing]
    return [*found, *beside, _fetched(old, root, _ranks(missing))]


def working_directories(listed: Sequence[Listing], old: Record) -> list[Holder]:
    """Return who has files that the program wrote to its working directories: one for each of these."""
    code, ranks = old.sent_code, {node.name: _ranks([node]) for node in old.nodes()}
    found = []
    for each in listed:
        by_node: dict[str, list[Entry]] = {}
        for entry in each.entries:
            name, inside = in_workdir(entry.path, _nodes(each, old))
            kind = "l" if entry.link else "f"
            if name and not is_sent(code, inside, entry.size, entry.mtime, kind):
                by_node.setdefault(name, []).append(replace(entry, path=inside))
        for name, written in by_node.items():
            if entries := whole(written):
                folder = posixpath.join(each.output, WORKDIR, name)
                mine, engine = ranks.get(name, frozenset()), each.engine
                rest = (mine, engine.files, each.output, folder, entries)
                found.append(Holder(name, engine.host, *rest, clock=each.clock, began=each.began))
    present = {holder.name for holder in found}
    root = old.paths.root / WORKDIR
    return [*found, *(_fetched(old, root / name, () if name in present else ranks[name]) for name in ranks)]


def _nodes(listed: Listing, old: Record) -> Collection[str]:
    """Return the nodes that have a working directory in a folder: without the run's record, each folder is one."""
    there = {entry.path.split("/")[1] for entry in listed.entries if entry.path.startswith(f"{WORKDIR}/")}
    return {node.name for node in old.nodes()} or there


def _is_output(path: str, nodes: Collection[str]) -> bool:
    """Whether a file of the output folder is the program's, outside of its working directories.

    Not hidden ones in checkpoints/, nor what belongs to a generation, whose number means another one in the new run.
    """
    not_meant = path.startswith((f"{CHECKPOINTS}/.", f"{GENERATIONS}/"))
    return is_programs(path) and not not_meant and not in_workdir(path, nodes)[0]


def _fetched(record: Record, folder: Path, ranks: Iterable[int]) -> Holder:
    """folder: of files that `fetch` brought. In the record's own folder only the program's count."""
    root = record.paths.root
    found = [(path, path.lstat()) for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    entries = [Entry(path.relative_to(folder).as_posix(), s.st_size, s.st_mtime) for path, s in found]
    if folder == root:
        apart = (*RECORD_FILES, ASIDE, LAYER, WORKDIR)
        entries = [e for e in entries if PurePosixPath(e.path).parts[0] not in apart and _is_output(e.path, ())]
    here = _Fetched(LocalMachine("this machine", ""))
    mine, inside = (frozenset(ranks), here, str(root), str(folder)), whole(entries)
    began = record.paths.plan.stat().st_mtime if record.paths.plan.exists() else -math.inf
    return Holder("this machine", LOCAL, *mine, inside, fetched=True, clock=NodeClock(read=time.time()), began=began)


def _ranks(nodes: Iterable[NodeOfRun]) -> frozenset[int]:
    return frozenset(rank for node in nodes for rank in node.ranks)


def whole(entries: Iterable[Entry]) -> dict[str, Entry]:
    """Return the complete files of a program in a folder by their paths, which come from a node.

    Left out are partial files, unsafe names, links that lead out of the folder, and caches of Python, which uses one of
    another version of a file if time and size are the same: all files of the code have the same time.
    """
    return {entry.path: entry for entry in entries if _is_whole(entry.path) and _stays_inside(entry)}


def _is_whole(path: str) -> bool:
    partial_file = any(part.endswith((".tmp", ".part")) for part in PurePosixPath(path).parts)
    return is_safe(path) and not partial_file and "__pycache__/" not in path


def _stays_inside(entry: Entry) -> bool:
    """Whether it is a file, or a link to a path in the same tree: `..` only at the beginning, and not too many."""
    parts = PurePosixPath(entry.link).parts
    up = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    safe = entry.link.isprintable() and not entry.link.startswith("/") and ".." not in parts[up:]
    return safe and up <= entry.path.count("/")


def when(file: tuple[str, tuple[Holder, Entry]]) -> tuple[bool, float]:
    """Return what orders files by time, logs first."""
    _, (holder, entry) = file
    return not is_log(entry), holder.written(entry)


def moment(holder: Holder, entry: Entry) -> str:
    return time.strftime("%a %H:%M:%S", time.localtime(entry.mtime - holder.clock.offset))
