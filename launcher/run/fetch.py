"""Copy a run's new and changed files from its nodes to this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.errors import LauncherError, NoRoomHere
from launcher.records.collect import Collected, collect, output_folders
from launcher.run.attempts import collected, newest
from launcher.run.locate import Attached


@dataclass(frozen=True)
class Fetched:
    """Folder of the files and number of bytes copied.

    problems: files that could not be copied, and why. failed: nodes from which nothing could be copied, and why.
    """

    folder: Path
    bytes: int
    problems: tuple[str, ...] = ()
    failed: tuple[LauncherError, ...] = ()


def fetch(attached: Attached, target: Path, *, checkpoints: bool = False) -> Fetched:
    """Copy TensorBoard logs, metrics, error files and rank logs from the reachable nodes; checkpoints on request."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    folders = output_folders(attached.engines, attached.nodes)
    if checkpoints and attached.record.min_nodes:  # prefer checkpoints of the nodes in the last generation
        collect(folders, target, mask=attached.record.mask)
        world = newest(collected(target, attached.nodes))
        folders.sort(key=lambda folder: world is None or folder.node not in world.members)
    results = collect(folders, target, mask=attached.record.mask, checkpoints=checkpoints)
    done = [result for result in results if isinstance(result, Collected)]
    failed = [result for result in results if isinstance(result, LauncherError)]
    problems = [problem for one in done for problem in one.problems]
    failed += [problem for problem in problems if isinstance(problem, NoRoomHere)]
    left = [str(problem) for problem in problems if not isinstance(problem, NoRoomHere)]
    if unmasked := attached.record.unmasked:
        left.insert(0, unmasked)
    return Fetched(target, sum(one.moved for one in done), tuple(left), (*failed, *attached.unreachable.values()))
