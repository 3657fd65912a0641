"""What is reported of a run while it is followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.model.container import ContainerState


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
    """No connection at the moment; the run may well go on there."""

    node: str
    reason: str


@dataclass(frozen=True)
class NodeBack:
    node: str


@dataclass(frozen=True)
class NodeGone:
    """Given up: all others have ended and this one has not answered for long."""

    node: str
    reason: str


@dataclass(frozen=True)
class NodeRestarted:
    """Its processes were started again; `why`: how the attempt before ended."""

    node: str
    restarts: int
    why: str


@dataclass(frozen=True)
class NotCollected:
    """A file of a node that could not be brought here, at the end; or one that could not be written here."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Nothing happened for a moment."""


Message = Output | Progress | NodeEnded | NodeLost | NodeBack | NodeGone | NodeRestarted | NotCollected | Tick
