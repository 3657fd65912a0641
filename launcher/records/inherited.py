"""Which files of a run's output folders it had only inherited from an earlier run (`--resume`), by their times alone:
those that are older than the folder, as a copy keeps its time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from launcher.node.output_folder import MARKER

NEVER = -math.inf  # when a run began that has inherited nothing


class File(Protocol):
    """path: relative to the output folder."""

    @property
    def path(self) -> str: ...
    @property
    def mtime(self) -> float: ...


def began(files: Iterable[File]) -> float:
    """Return when the run began on a node, by its clock: when the output folder was made. files: all that it has."""
    return next((file.mtime for file in files if file.path == MARKER), NEVER)


def superseded(listed: Sequence[tuple[float, Collection[File]]]) -> list[set[str]]:
    """Return the paths of those files that each node had inherited and that another one's program has written since.

    listed: of each node, when the run began there and its files.
    """
    written = {file.path for since, files in listed for file in files if file.mtime >= since}
    return [{file.path for file in files if file.mtime < since} & written for since, files in listed]
