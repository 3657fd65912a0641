"""The checkpoints that a new run begins with: the newest on a node of an earlier run, or fetched here."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.errors import NodeUnfit
from launcher.model.plan import NodePlan, Plan, RunId
from launcher.node.connect import Fleet, connect
from launcher.node.engine import Engine
from launcher.node.files import FileEntry, Files, Span
from launcher.node.machine import LocalMachine
from launcher.node.parallel import run_all_settled
from launcher.records.paths import RUNS, RunPaths
from launcher.records.store import Record
from launcher.records.wanted import want

CHECKPOINTS = "checkpoints"  # in the output folder: where the trainer saves, and from where it goes on by itself
ABOUT_THE_SAME = 10.0  # seconds: nodes write the same checkpoint a moment apart, and their clocks differ
Copy = Callable[[Engine, NodePlan], None]


@dataclass(frozen=True)
class Place:
    """Checkpoints of the earlier run: on a node, or in this machine's `runs/`."""

    name: str
    files: Files
    folder: str
    entries: Sequence[FileEntry]

    @property
    def newest(self) -> float:
        """When the last of them was written, by the clock of the node that wrote it."""
        return max((entry.mtime for entry in self.entries), default=0.0)


@contextmanager
def checkpoints_of(
    run: RunId, plan: Plan, fleet: Fleet, ssh_config: Path | None, log: Callable[[str], None], *, required: bool = True
) -> Iterator[Copy]:
    """A function that puts the run's checkpoints into a new node's output folder, before it starts.

    Each node copies its own; the first one, which loads them, gets the newest of all. Its nodes are those of the new
    run and those on record here; one that does not answer is left out.
    Raises NodeUnfit where a checkpoint of it is required and there is none.
    """
    old = Record(RunPaths(RUNS / run))
    here = {engine.host for engine in fleet.engines}
    elsewhere = {node.host: node for node in old.nodes() if node.host not in here}
    hosts = [(node.name, host) for host, node in elsewhere.items()]
    with connect(hosts, old.runtime, ssh_config, allow_failures=True, ping=False) as others:

        def look_beside_new(engine: Engine) -> Place:
            return _look(engine, posixpath.join(posixpath.dirname(plan.on(engine.node).container.output_dir), run))

        own = dict(zip(fleet.engines, fleet.each(look_beside_new), strict=True))
        looks = [partial(_look, engine, elsewhere[engine.host].output) for engine in others.engines]
        found = dict(zip([engine.node for engine in others.engines], run_all_settled(looks), strict=True))
        places = [*own.values(), *(place for place in found.values() if isinstance(place, Place))]
        newest = max([*places, _fetched(old)], key=lambda place: place.newest)
        if required and not newest.entries:
            failed = sorted([*others.failed, *(node for node, place in found.items() if not isinstance(place, Place))])
            silent = f"; no answer from {', '.join(failed)}" if failed else ""
            raise NodeUnfit(
                f"run {run}",
                f"has left no {CHECKPOINTS}/ to go on from on {', '.join(place.name for place in places)}{silent}",
                f"it must not be purged; a copy in {RUNS}/{run}/ (launcher fetch --checkpoints) does too",
            )

        def copy(engine: Engine, planned: NodePlan) -> None:
            mine, target = own[engine], posixpath.join(planned.container.output_dir, CHECKPOINTS)
            if planned.rank == 0 and mine.newest < newest.newest - ABOUT_THE_SAME:
                log(f"{planned.node}: begins with the checkpoints of {newest.name}")
                engine.files.make_dir(target)
                for entry in newest.entries:
                    spans = newest.files.read_spans([Span(f"{newest.folder}/{entry.path}", 0, entry.size)])
                    engine.files.write(f"{target}/{entry.path}", (piece for _, piece in spans), entry.size)
            elif mine.entries:  # a copy, not links: a program may overwrite its checkpoint in place
                engine.files.copy_tree(mine.folder, target)

        yield copy


def _look(engine: Engine, output: str) -> Place:
    folder = posixpath.join(output, CHECKPOINTS)
    return Place(engine.node, engine.files, folder, whole(engine.files.scan(folder)))


def _fetched(record: Record) -> Place:
    folder = (record.paths.root / CHECKPOINTS).absolute()
    found = [(path.relative_to(folder).as_posix(), path.stat()) for path in folder.rglob("*") if path.is_file()]
    entries = [FileEntry(name, stat.st_size, stat.st_mtime) for name, stat in found]
    here = Files(LocalMachine("this machine", ""))
    return Place(f"{record.paths.root / CHECKPOINTS} here", here, str(folder), whole(entries))


def whole(entries: Sequence[FileEntry]) -> list[FileEntry]:
    """Without those that were being written, the marks of writers, and paths that lead elsewhere: a node named them."""
    safe = [entry for entry in entries if want(f"{CHECKPOINTS}/{entry.path}", checkpoints=True)]
    return [entry for entry in safe if not entry.path.endswith((".tmp", ".part")) and entry.path[0] != "."]
