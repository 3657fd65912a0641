"""How far an image is on its way to a node, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """How far one node is. `total` is what the layers it lacks take up, an estimate; bytes throughout."""

    node: str
    sent: int
    total: int
    done: bool = False


Tell = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """For callers who show nothing."""
