"""Copy a run's new and changed files from its nodes to this machine, and tell what else the program wrote."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launcher.errors import LauncherError, NodeUnfit, NoRoomHere
from launcher.model.container import WORKDIR
from launcher.node import output_folder
from launcher.node.files import FileEntry
from launcher.node.parallel import run_all_settled
from launcher.records.collect import Collected, collect, output_folders
from launcher.records.paths import as_shown
from launcher.records.store import Record
from launcher.records.wanted import want
from launcher.records.workdir import Written, is_sent, summary, workdirs
from launcher.run.attempts import collected, newest
from launcher.run.locate import Attached

_OWN = ("state", ".node", output_folder.MARKER)  # in an output folder: no results


def written(attached: Attached, without: Collection[str] = ()) -> Written | None:
    """Return what the program wrote to the working directories of the reachable nodes, except those in `without`.

    None: all of it is in the run's folder here, or it cannot be told from the code, whose record is missing.
    """
    code = attached.record.sent_code
    if code is None:
        return None
    folders = output_folders(attached.engines, [node for node in attached.nodes if node.name not in without])
    ask = partial(workdirs, code=code, timeout=None)
    listed = run_all_settled([partial(ask, one.files, one.path, one.nodes) for one in folders])
    found = [workdir for each in listed if not isinstance(each, LauncherError) for workdir in each]
    root = attached.record.paths.root
    here = all(_is_here(root, f"{WORKDIR}/{each.node}/{file.path}", file) for each in found for file in each.written)
    unlisted = next((f"{each.where}: {each.what}" for each in listed if isinstance(each, NodeUnfit)), "")
    return replace(summary(found), unlisted=unlisted) if unlisted or not here else None


def unfetched(files: Iterable[FileEntry], record: Record | None) -> list[FileEntry]:
    """Return the files of a run's output folder (paths relative to it) that are only there, as far as is known.

    Empty files, the sent code and the launcher's own files do not count. record: if this folder has started the run;
    else it is only known which files every launcher collects at the end of a run.
    """
    code = (None if record is None else record.sent_code) or {}
    left = []
    for file in files:
        top, _, rest = file.path.partition("/")
        own = top in _OWN or (top == "logs" and rest.endswith(".clock"))
        sent = top == WORKDIR and is_sent(code, rest.partition("/")[2], file.size, file.mtime)
        if own or sent or not file.size:
            continue
        wanted = want(file.path, checkpoints=record is not None, trackers=record is not None)
        if wanted is None or (record is not None and not _is_here(record.paths.root, file.path, file)):
            left.append(file)
    return left


def _is_here(root: Path, path: str, file: FileEntry) -> bool:
    """Return whether a file was collected completely, or cannot be. path: from the output folder."""
    wanted = want(path, checkpoints=True, trackers=True)
    if wanted is None:
        return True
    try:
        found = (root / wanted.local).stat()
    except OSError:
        return False
    return found.st_size == file.size and (wanted.grows or int(found.st_mtime) == int(file.mtime))


# what a tracker wrote -> the command that shows it or sends it on, in which {} is the folder that has it
_SYNC = {
    "wandb/offline-run-*": "wandb sync {}/wandb/offline-run-*",
    "mlflow.db": "mlflow ui --backend-store-uri sqlite:///{}/mlflow.db",
    ".trackio": "TRACKIO_DIR={}/.trackio trackio show",
}


@dataclass(frozen=True)
class Fetched:
    """Folder of the files and number of bytes copied.

    problems: files that could not be copied, and why. failed: nodes from which nothing could be copied, and why.
    """

    folder: Path
    bytes: int
    problems: tuple[str, ...] = ()
    failed: tuple[LauncherError, ...] = ()

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

    checkpoints: also copy them, and what the program wrote to its working directories.
    """
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    folders = output_folders(attached.engines, attached.nodes)
    if checkpoints and attached.record.min_nodes:  # prefer checkpoints of the nodes in the last generation
        collect(folders, target, mask=attached.record.mask, code=attached.record.sent_code)
        world = newest(collected(target, attached.nodes))
        folders.sort(key=lambda folder: world is None or folder.node not in world.members)
    code = attached.record.sent_code
    results = collect(folders, target, mask=attached.record.mask, checkpoints=checkpoints, trackers=True, code=code)
    done = [result for result in results if isinstance(result, Collected)]
    failed = [result for result in results if isinstance(result, LauncherError)]
    problems = [problem for one in done for problem in one.problems]
    failed += [problem for problem in problems if isinstance(problem, NoRoomHere)]
    left = [str(problem) for problem in problems if not isinstance(problem, NoRoomHere)]
    if unmasked := attached.record.unmasked:
        left.insert(0, unmasked)
    return Fetched(target, sum(one.moved for one in done), tuple(left), (*failed, *attached.unreachable.values()))
