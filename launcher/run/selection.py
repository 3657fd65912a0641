"""Which output of a run is shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Selection:
    """Which output is shown, and from which position. Default: that of rank 0, from the start.

    rank: output of one worker. node: of one node. all_nodes: of every node. tail: only the last `tail` lines. since: a
    duration (10m: ten minutes ago) or an ISO 8601 time.
    """

    rank: int | None = None
    node: str | None = None
    all_nodes: bool = False
    tail: int | None = None
    since: str | None = None


MASTER = Selection()
