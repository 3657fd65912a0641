"""Messages about a followed run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from launcher.model.container import ContainerState
from launcher.run.watch.attempts import Generation


@dataclass(frozen=True)
class Message:
    """Base class of all messages. event: as what it is recorded in events.jsonl; "": it is not."""

    event: ClassVar[str] = ""


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
    event: ClassVar[str] = "node ended"
    node: str
    state: ContainerState


@dataclass(frozen=True)
class NodeAway(Message):
    """The node has not answered since `since` (seconds since the epoch), but may come back, and the run may go on."""

    event: ClassVar[str] = "node lost"
    node: str
    reason: str
    since: float


@dataclass(frozen=True)
class NodeBack(Message):
    event: ClassVar[str] = "node back"
    node: str


@dataclass(frozen=True)
class NodeGivenUp(Message):
    """The node is away and is no longer waited for: the run has failed or was stopped elsewhere."""

    event: ClassVar[str] = "node gone"
    node: str
    reason: str
    since: float


@dataclass(frozen=True)
class NodeRemoved(Message):
    """Its container was removed while it was followed.

    folder: with `runtime: process`, the output folder, which takes the role of the container.
    """

    event: ClassVar[str] = "node removed"
    node: str
    folder: str = ""


@dataclass(frozen=True)
class NodeStopped(Message):
    """A user (user@host) is stopping the run on the node."""

    event: ClassVar[str] = "node stopped"
    node: str
    by: str


@dataclass(frozen=True)
class NodeBudget(Message):
    """The run has reached its budget, as reported by this node, that of rank 0."""

    event: ClassVar[str] = "node budget"
    node: str


@dataclass(frozen=True)
class NodeWaits(Message):
    """No process has started; `reason`: the state of the cluster's job, `job 12: PENDING (Resources)`, or "" at last.

    queued: the job has not started either.
    """

    event: ClassVar[str] = "node waits"
    node: str
    reason: str
    queued: bool


@dataclass(frozen=True)
class NodeRestarted(Message):
    """The node's processes were restarted; `why`: how the previous attempt ended."""

    event: ClassVar[str] = "node restarted"
    node: str
    restarts: int
    why: str


@dataclass(frozen=True)
class RankAtBreakpoint(Message):
    """A rank waits in breakpoint() or skips it, on a node whose output, which says so, is not shown."""

    event: ClassVar[str] = "rankatbreakpoint"
    what: str


@dataclass(frozen=True)
class RankZeroMoved(Message):
    """A job with min_nodes started a new generation, with rank 0 on this node."""

    event: ClassVar[str] = "rankzeromoved"
    node: str
    world: Generation


@dataclass(frozen=True)
class NodeOver(Message):
    """The nodes of a job with min_nodes do not restart its program, as reported by this node."""

    event: ClassVar[str] = "node over"
    node: str
    why: str


@dataclass(frozen=True)
class Gradients(Message):
    """All nodes are connected: how their gradients travel."""

    event: ClassVar[str] = "gradients"
    how: str


@dataclass(frozen=True)
class NotCollected(Message):
    """A node's file that could not be collected at the end, or could not be written locally."""

    event: ClassVar[str] = "notcollected"
    reason: str


@dataclass(frozen=True)
class Warned(Message):
    """An error outside of the run itself, such as a failed notification, or that its ranks do not train together."""

    event: ClassVar[str] = "warned"
    reason: str


class Tick(Message):
    """Nothing happened for a moment."""


def clock(moment: float) -> str:
    """Format seconds since the epoch as weekday and local time, as an outage can last for days."""
    return time.strftime("%a %H:%M", time.localtime(moment))
