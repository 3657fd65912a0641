"""How a long step reports to its caller, which shows it to a person or not at all."""

from __future__ import annotations

from collections.abc import Callable

Log = Callable[[str], None]  # a line for a person
OnProgress = Callable[[str, int, int], None]  # node, bytes sent, an estimate of all; equal when the node has the image


def no_progress(node: str, sent: int, total: int) -> None:
    """For callers that show nothing."""
