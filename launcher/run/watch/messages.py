"""Messages about a followed run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.model.container import ContainerState
from launcher.run.watch.attempts import World


@dataclass(frozen=True)
class Message:
    """Base class of all messages."""


@dataclass(frozen=True)
class Output(Message):
    """Bytes appended to a node's log file."""

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
    """The node has not responded since `since` (seconds since the epoch); the run may still be running on it."""

    node: str
    reason: str
    since: float


@dataclass(frozen=True)
class NodeBack(Message):
    node: str


@dataclass(frozen=True)
class NodeGone(Message):
    """The node was given up: it is unreachable, and the run has failed or was stopped elsewhere."""

    node: str
    reason: str
    since: float


@dataclass(frozen=True)
class NodeRemoved(Message):
    """Its container was removed while it was followed.

    folder: with `runtime: process`, the output folder, which takes the role of the container.
    """

    node: str
    folder: str = ""


@dataclass(frozen=True)
class NodeStopped(Message):
    """A user (user@host) is stopping the run on the node."""

    node: str
    by: str


@dataclass(frozen=True)
class NodeBudget(Message):
    """The run has reached its budget, as reported by this node, that of rank 0."""

    node: str


@dataclass(frozen=True)
class NodeWaits(Message):
    """No process has started; `reason`: the state of the cluster's job, `job 12: PENDING (Resources)`, or "" at last.

    queued: the job has not started either.
    """

    node: str
    reason: str
    queued: bool


@dataclass(frozen=True)
class NodeRestarted(Message):
    """The node's processes were restarted; `why`: how the previous attempt ended."""

    node: str
    restarts: int
    why: str


@dataclass(frozen=True)
class RankAtBreakpoint(Message):
    """A rank waits in breakpoint() or skips it, on a node whose output, which says so, is not shown."""

    what: str


@dataclass(frozen=True)
class RankZeroMoved(Message):
    """A job with min_nodes started a new generation, with rank 0 on this node."""

    node: str
    world: World


@dataclass(frozen=True)
class NodeOver(Message):
    """The nodes of a job with min_nodes do not restart its program, as reported by this node."""

    node: str
    why: str


@dataclass(frozen=True)
class Gradients(Message):
    """All nodes are connected: how their gradients travel."""

    how: str


@dataclass(frozen=True)
class NotCollected(Message):
    """A node's file that could not be collected at the end, or could not be written locally."""

    reason: str


@dataclass(frozen=True)
class Warned(Message):
    """An error outside of the run itself, such as a failed notification, or that its ranks do not train together."""

    reason: str


class Tick(Message):
    """Nothing happened for a moment."""


def clock(moment: float) -> str:
    """Format seconds since the epoch as weekday and local time, as an outage can last for days."""
    return time.strftime("%a %H:%M", time.localtime(moment))
