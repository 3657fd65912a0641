"""How a long step reports to its caller, which shows it to a person or not at all."""

from __future__ import annotations

from collections.abc import Callable

Log = Callable[[str], None]  # a line for a person; a Step is one that the next one may replace
OnProgress = Callable[[str, int, int], None]  # node, bytes sent, an estimate of all; equal when the node has the image


class Step(str):
    """A line for a person that says what a long step does now; the next Step of the same node replaces it.

    at_once: where lines cannot be replaced it is printed all the same, not now and then.
    """

    node: str
    at_once: bool

    def __new__(cls, node: str, what: str, *, at_once: bool = False) -> Step:
        step = super().__new__(cls, f"{node}: {what}")
        step.node, step.at_once = node, at_once
        return step


def no_progress(node: str, sent: int, total: int) -> None:
    """For callers that show nothing."""
