"""The checkpoints from which a new run starts: the newest on a node of an earlier run, or fetched to this machine."""

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

CHECKPOINTS = "checkpoints"  # in the output folder; the trainer saves here and resumes from here automatically
ABOUT_THE_SAME = 10.0  # seconds; nodes do not write the same checkpoint simultaneously, and their clocks differ
Copy = Callable[[Engine, NodePlan], None]


@dataclass(frozen=True)
class CheckpointFolder:
    """Checkpoints of the earlier run on a node, or in the local `runs/`."""

    name: str
    files: Files
    folder: str
    entries: Sequence[FileEntry]

    @property
    def newest(self) -> float:
        """Modification time of the newest entry, by the clock of the node that wrote it."""
        return max((entry.mtime for entry in self.entries), default=0.0)


@contextmanager
def checkpoints_of(
    run: RunId, plan: Plan, fleet: Fleet, ssh_config: Path | None, log: Callable[[str], None], *, required: bool = True
) -> Iterator[Copy]:
    """Yield a function that copies the run's checkpoints into a new node's output folder before the node starts.

    Each node copies its own; the first node, which loads them, gets the newest of all. Searches the nodes of the new
    run and of the earlier run's local record; unreachable nodes are skipped.
    Raises NodeUnfit if a checkpoint is required and none was found.
    """
    old = Record(RunPaths(RUNS / run))
    here = {engine.host for engine in fleet.engines}
    elsewhere = {node.host: node for node in old.nodes() if node.host not in here}
    hosts = [(node.name, host) for host, node in elsewhere.items()]
    with connect(hosts, old.runtime, ssh_config, allow_failures=True, ping=False) as others:

        def list_on_new_node(engine: Engine) -> CheckpointFolder:
            return _on_node(engine, posixpath.join(posixpath.dirname(plan.on(engine.node).container.output_dir), run))

        own = dict(zip(fleet.engines, fleet.each(list_on_new_node), strict=True))
        listings = [partial(_on_node, engine, elsewhere[engine.host].output) for engine in others.engines]
        found = dict(zip([engine.node for engine in others.engines], run_all_settled(listings), strict=True))
        folders = [*own.values(), *(each for each in found.values() if isinstance(each, CheckpointFolder))]
        newest = max([*folders, _fetched(old)], key=lambda folder: folder.newest)
        if required and not newest.entries:
            unlisted = (node for node, each in found.items() if not isinstance(each, CheckpointFolder))
            failed = sorted([*others.failed, *unlisted])
            silent = f"; no answer from {', '.join(failed)}" if failed else ""
            raise NodeUnfit(
                f"run {run}",
                f"has no {CHECKPOINTS}/ to resume from on {', '.join(each.name for each in folders)}{silent}",
                f"do not purge a run that you want to resume, or keep a copy in {RUNS}/{run}/: "
                "launcher fetch --checkpoints",
            )

        def copy(engine: Engine, planned: NodePlan) -> None:
            mine, target = own[engine], posixpath.join(planned.container.output_dir, CHECKPOINTS)
            if planned.rank == 0 and mine.newest < newest.newest - ABOUT_THE_SAME:
                log(f"{planned.node}: starts from the checkpoints of {newest.name}")
                engine.files.make_dir(target)
                for entry in newest.entries:
                    spans = newest.files.read_spans([Span(f"{newest.folder}/{entry.path}", 0, entry.size)])
                    engine.files.write(f"{target}/{entry.path}", (piece for _, piece in spans), entry.size)
            elif mine.entries:  # a copy, not links: a program may overwrite a checkpoint in place
                engine.files.copy_tree(mine.folder, target)

        yield copy


def _on_node(engine: Engine, output: str) -> CheckpointFolder:
    folder = posixpath.join(output, CHECKPOINTS)
    return CheckpointFolder(engine.node, engine.files, folder, whole(engine.files.scan(folder)))


def _fetched(record: Record) -> CheckpointFolder:
    folder = (record.paths.root / CHECKPOINTS).absolute()
    found = [(path.relative_to(folder).as_posix(), path.stat()) for path in folder.rglob("*") if path.is_file()]
    entries = [FileEntry(name, stat.st_size, stat.st_mtime) for name, stat in found]
    here = Files(LocalMachine("this machine", ""))
    return CheckpointFolder(f"{record.paths.root / CHECKPOINTS} on this machine", here, str(folder), whole(entries))


def whole(entries: Sequence[FileEntry]) -> list[FileEntry]:
    """Return the complete checkpoints: no partial files, hidden files or unsafe paths, as a node supplied the names."""
    safe = [entry for entry in entries if want(f"{CHECKPOINTS}/{entry.path}", checkpoints=True)]
    return [entry for entry in safe if not entry.path.endswith((".tmp", ".part")) and entry.path[0] != "."]
