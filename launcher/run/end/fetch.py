"""Copy a run's new and changed files from its nodes to this machine, and tell what else the program wrote."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launcher.errors import EngineFailed, LauncherError, NodeUnfit, NoRoomHere
from launcher.model.container import WORKDIR
from launcher.node.engine import GROWN_WITHIN, Engine
from launcher.node.files import FileEntry
from launcher.node.parallel import run_all_catching, run_both
from launcher.records.collect import Collected, OutputFolder, collect, output_folders
from launcher.records.paths import LAYER, as_shown
from launcher.records.store import BROUGHT, FETCHED, NodeOfRun, Record
from launcher.records.wanted import is_safe
from launcher.records.writer import replace as write_whole
from launcher.records.written import Written, is_another_nodes, is_here, is_written, left_outside, outside, summary
from launcher.run.locate import Attached
from launcher.run.watch.attempts import Generation, collected, newest


def written(attached: Attached, without: Collection[str] = ()) -> Written | None:
    """Return what the program wrote to the output folders of the reachable nodes, except those in `without`.

    None: all of it is in the run's folder here.
    """
    record, asked = attached.record, [node for node in attached.nodes if node.name not in without]
    nodes = [node.name for node in record.nodes()]
    folders = output_folders(attached.engines, asked, inherits=record.inherits)
    listing = [partial(files_of_program, folder, record) for folder in folders]
    growing = [partial(not_brought, attached.engines[node.name], node.name, node.container, record) for node in asked]
    listed, grown = run_both(partial(run_all_catching, listing), partial(run_all_catching, growing))
    found = [file for each in listed if not isinstance(each, LauncherError) for file in each]
    beside = outside([file for each in grown if not isinstance(each, LauncherError) for file in each])
    unlisted = next(
        (f"{each.where}: {each.what}" for each in (*listed, *grown) if isinstance(each, (NodeUnfit, EngineFailed))), ""
    )
    if unlisted or not all(is_here(file, record) for file in found):
        return replace(summary(found, nodes), unlisted=unlisted, outside=beside)
    return Written(0, 0, (), outside=beside) if beside else None


def not_brought(engine: Engine, node: str, container: str, record: Record) -> list[FileEntry]:
    """Return what only this container of a node has, in its own layer, as Engine.grown. Raises EngineFailed, ..."""
    known = engine.grown(container, None if node in record.brought() else GROWN_WITHIN)
    return left_outside(known, node, (record.paths.root, *record.fetched_to()))


def files_of_program(folder: OutputFolder, record: Record) -> list[FileEntry]:
    """Return what the program wrote to an output folder. Raises NodeUnfit, NodeUnreachable."""
    nodes = [node.name for node in record.nodes()]
    files = folder.files.scan(folder.path)
    own = folder.began(files)
    return [
        file
        for file in files
        if file.mtime >= own
        and not is_another_nodes(file.path, folder.nodes, nodes)
        and is_written(file, nodes, record.sent_code)
    ]


# what a tracker wrote -> the command that shows it or sends it on, in which {} is the folder that has it
_SYNC = {
    "wandb/offline-run-*": "wandb sync {}/wandb/offline-run-*",
    "mlflow.db": "mlflow ui --backend-store-uri sqlite:///{}/mlflow.db",
    ".trackio": "TRACKIO_DIR={}/.trackio trackio show",
}


@dataclass(frozen=True)
class Fetched:
    """Folder of the files and number of bytes copied.

    problems: files that could not be copied, and why. failed: nodes from which nothing could be copied, and why. gone:
    output folders that do not exist any more, with what is known of that.
    """

    folder: Path
    bytes: int
    problems: tuple[str, ...] = ()
    failed: tuple[LauncherError, ...] = ()
    gone: tuple[str, ...] = ()

    @property
    def shown(self) -> Path:
        """The folder as messages show it."""
        return as_shown(self.folder)

    def trackers(self) -> list[str]:
        """Return the commands for what experiment trackers wrote offline."""
        found = []
        for pattern, command in _SYNC.items():
            for place in ("", f"{WORKDIR}/*/"):
                depth = pattern.count("/")
                folders = {path.parents[depth] for path in self.shown.glob(place + pattern)}
                found += [command.format(shlex.quote(str(folder))) for folder in sorted(folders)]
        return found


def fetch(attached: Attached, target: Path, *, checkpoints: bool = False) -> Fetched:
    """Copy TensorBoard logs, metrics, error files, rank logs and what trackers wrote from the reachable nodes.

    checkpoints: also copy them, and what else the program wrote to its output folder and its working directory, or
    elsewhere in its container.
    """
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    record = attached.record
    folders = output_folders(attached.engines, attached.nodes, inherits=record.inherits)
    every = [node.name for node in record.nodes()]
    copy = partial(collect, local=target, mask=record.mask, code=record.sent_code, nodes=every)
    if checkpoints and record.min_nodes:
        copy(folders)  # also what the nodes recorded of their generations
        folders = _last_generation_first(folders, newest(collected(target, attached.nodes)))
    results = copy(folders, checkpoints=checkpoints, trackers=True, replicas=record.min_nodes > 0)
    if target != record.paths.root and any(target.iterdir()):
        record.event(FETCHED, folder=str(target.absolute()))
    if checkpoints:
        bring = [partial(_bring, attached.engines[node.name], node, record, target) for node in attached.nodes]
        results += run_all_catching(bring)
    done = [result for result in results if isinstance(result, Collected)]
    failed = [result for result in results if isinstance(result, LauncherError)]
    problems = [problem for one in done for problem in one.problems]
    no_room = [problem for problem in problems if isinstance(problem, NoRoomHere)]
    others = [str(problem) for problem in problems if not isinstance(problem, NoRoomHere)]
    moved = sum(one.moved for one in done)
    return Fetched(
        folder=target,
        bytes=moved,
        problems=(record.unmasked, *others) if record.unmasked else (*others,),
        failed=(*failed, *no_room, *attached.unreachable.values()),
        gone=() if moved else _gone(attached, folders),
    )


def _last_generation_first(folders: Sequence[OutputFolder], last: Generation | None) -> list[OutputFolder]:
    """Sort folders so that of files with the same name, those of the nodes in the last generation are preferred."""
    members = last.members if last is not None else ()
    return sorted(folders, key=lambda folder: folder.node not in members)  # the others stay in their order


def _gone(attached: Attached, folders: Sequence[OutputFolder]) -> tuple[str, ...]:
    """Say which output folders do not exist any more, who deleted them, and where copies of their files are; or why
    the run never had any.
    """
    record, found = attached.record, list[str]()
    never = record.why_not_started
    scanned = run_all_catching([partial(folder.files.scan, folder.path, lambda _: None) for folder in folders])
    for folder, files in zip(folders, scanned, strict=True):
        if not files and not never:  # it always has a marker
            how = record.purged(attached.engines[folder.node].host) or "on the node, or from another folder"
            found.append(f"its output folder {folder.path} on {folder.node} was deleted {how}")
    if never and not any(scanned):
        return (f"was not started: {never}",)
    if found and (copies := record.copies()):
        found.append(f"what was fetched before is in {', '.join(f'{as_shown(folder)}/' for folder in copies)}")
    return tuple(found)


def _bring(engine: Engine, node: NodeOfRun, record: Record, target: Path) -> Collected:
    """Copy what the program wrote to the own layer of the node's container."""
    moved, problems = 0, list[LauncherError]()
    for file in left_outside(engine.grown(node.container, None), node.name, [target]):
        path = f"{LAYER}/{node.name}/{file.path.lstrip('/')}"
        free = shutil.disk_usage(target).free
        try:
            if not is_safe(path):
                problems.append(NodeUnfit(node.name, f"{file.path!r} has a name that cannot be used here: ignored"))
            elif file.size > free:
                what = f"{file.path} was not copied: it has {file.size:,} bytes, more than {free:,}"
                problems.append(NodeUnfit(node.name, what, "free disk space on this machine"))
            else:
                moved += write_whole(target / path, engine.read_grown(node.container, file), file.mtime)
        except OSError as error:
            what = f"{file.path} could not be written here: {error.strerror}"
            problems.append(NodeUnfit(node.name, what))
        except EngineFailed as error:
            problems.append(error)
    record.event(BROUGHT, node=node.name)
    return Collected(moved, tuple(problems))
