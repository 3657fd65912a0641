"""A run's files, copied from its nodes to the caller: what is new since the last time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.errors import LauncherError, NoRoomHere
from launcher.records.collect import Collected, collect, output_folders
from launcher.run.attempts import collected, newest
from launcher.run.locate import Attached


@dataclass(frozen=True)
class Fetched:
    """Where the files are, and how many bytes of them are new.

    problems: files that were left on their node, and why. failed: nodes of which nothing could be copied, and why.
    """

    folder: Path
    bytes: int
    problems: tuple[str, ...] = ()
    failed: tuple[LauncherError, ...] = ()


def fetch(attached: Attached, target: Path, *, checkpoints: bool = False) -> Fetched:
    """Copy TensorBoard logs, metrics, error files and rank logs of the nodes that answer; checkpoints on request."""
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    folders = output_folders(attached.engines, attached.nodes)
    if checkpoints and attached.record.min_nodes:  # those of the nodes that took part to the end come first
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
