"""What is reported of a run while it is followed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.model.container import ContainerState
from launcher.run.worlds import World


@dataclass(frozen=True)
class Output:
    """Bytes that a node's log file has grown by."""

    node: str
    data: bytes


@dataclass(frozen=True)
class Progress:
    """A line of the master's metrics.jsonl."""

    fields: Mapping[str, Any]


@dataclass(frozen=True)
class NodeEnded:
    node: str
    state: ContainerState


@dataclass(frozen=True)
class NodeLost:
    """No answer since then (seconds since the epoch); the run may well go on there."""

    node: str
    reason: str
    since: float


@dataclass(frozen=True)
class NodeBack:
    node: str


@dataclass(frozen=True)
class NodeGone:
    """Given up: the run has failed or was stopped elsewhere, and this one has not answered for long."""

    node: str
    reason: str
    since: float


@dataclass(frozen=True)
class NodeRemoved:
    """Its container was removed while it was followed."""

    node: str


@dataclass(frozen=True)
class NodeStopped:
    """A user (user@host) stops the run there."""

    node: str
    by: str


@dataclass(frozen=True)
class NodeRestarted:
    """Its processes were started again; `why`: how the attempt before ended."""

    node: str
    restarts: int
    why: str


@dataclass(frozen=True)
class RankZeroMoved:
    """A job with min_nodes trains in a new generation, whose rank 0 is on that node."""

    node: str
    world: World


@dataclass(frozen=True)
class NotCollected:
    """A file of a node that could not be brought here, at the end; or one that could not be written here."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Nothing happened for a moment."""


Message = (
    Output
    | Progress
    | NodeEnded
    | NodeLost
    | NodeBack
    | NodeGone
    | NodeRemoved
    | NodeStopped
    | NodeRestarted
    | RankZeroMoved
    | NotCollected
    | Tick
)


def clock(moment: float) -> str:
    """Seconds since the epoch, as a person here reads them: a silence may last for days."""
    return time.strftime("%a %H:%M", time.localtime(moment))
