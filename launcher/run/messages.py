"""What is reported of a run while it is followed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.model.container import ContainerState
from launcher.run.attempts import World


@dataclass(frozen=True)
class Message:
    """One of those below."""


@dataclass(frozen=True)
class Output(Message):
    """Bytes that a node's log file has grown by."""

    node: str
    data: bytes


@dataclass(frozen=True)
class Progress(Message):
    """A line of the master's metrics.jsonl."""

    fields: Mapping[str, Any]


@dataclass(frozen=True)
class NodeEnded(Message):
    node: str
    state: ContainerState


@dataclass(frozen=True)
class NodeLost(Message):
    """No answer since then (seconds since the epoch); the run may well go on there."""

    node: str
    reason: str
    since: float


@dataclass(frozen=True)
class NodeBack(Message):
    node: str


@dataclass(frozen=True)
class NodeGone(Message):
    """Given up: the run has failed or was stopped elsewhere, and this one has not answered for long."""

    node: str
    reason: str
    since: float


@dataclass(frozen=True)
class NodeRemoved(Message):
    """Its container was removed while it was followed.

    folder: under `runtime: process`, the output folder, which has what a container is there.
    """

    node: str
    folder: str = ""


@dataclass(frozen=True)
class NodeStopped(Message):
    """A user (user@host) stops the run there."""

    node: str
    by: str


@dataclass(frozen=True)
class NodeWaits(Message):
    """No process of it has started; `reason`: what a cluster says of its job, `job 12: PENDING (Resources)`."""

    node: str
    reason: str


@dataclass(frozen=True)
class NodeRestarted(Message):
    """Its processes were started again; `why`: how the attempt before ended."""

    node: str
    restarts: int
    why: str


@dataclass(frozen=True)
class RankZeroMoved(Message):
    """A job with min_nodes trains in a new generation, whose rank 0 is on that node."""

    node: str
    world: World


@dataclass(frozen=True)
class NodeOver(Message):
    """The nodes of a job with min_nodes do not start its program again, and say so on that node."""

    node: str
    why: str


@dataclass(frozen=True)
class NotCollected(Message):
    """A file of a node that could not be brought here, at the end; or one that could not be written here."""

    reason: str


@dataclass(frozen=True)
class Warned(Message):
    """Something beside the run itself went wrong, such as its notification."""

    reason: str


class Tick(Message):
    """Nothing happened for a moment."""


def clock(moment: float) -> str:
    """Seconds since the epoch, as a person here reads them: a silence may last for days."""
    return time.strftime("%a %H:%M", time.localtime(moment))
