"""Progress reports of long operations to their caller, which may display them."""

from __future__ import annotations

from collections.abc import Callable

Log = Callable[[str], None]  # a line to display; a later StatusLine may replace an earlier one
OnProgress = Callable[[str, int, int], None]  # node, bytes sent, estimated total; equal when the node has the image


class StatusLine(str):
    """A status line for a long operation; the next StatusLine of the same node replaces it.

    immediate: always printed, even if lines cannot be replaced and other StatusLines are printed only now and then.
    """

    node: str
    immediate: bool

    def __new__(cls, node: str, what: str, *, immediate: bool = False) -> StatusLine:
        step = super().__new__(cls, f"{node}: {what}")
        step.node, step.immediate = node, immediate
        return step


def silent(text: str) -> None:
    """For callers that display no messages."""


def no_progress(node: str, sent: int, total: int) -> None:
    """For callers that display no progress."""
