"""Tracebacks are kept back until it is known whether the run ends by them."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.run.diagnose import TRACEBACK

HOLD = 10.0  # seconds
LIMIT = 2000  # lines: a program that prints more after a traceback goes on


class Held:
    """Lines from a traceback on, for a while.

    If the run fails meanwhile, the first failure comes before them, which may be another rank's; if it goes on, they
    were none that matter.
    """

    def __init__(self) -> None:
        self.failing = False  # a node has ended badly: what comes now belongs to that
        self._lines: list[str] = []
        self._since = 0.0

    def sift(self, lines: Sequence[str], now: float) -> list[str]:
        """What can be shown at that time (of time.monotonic()), of these lines and of those that were kept back."""
        shown: list[str] = []
        if not self._lines:
            heads = (place for place, line in enumerate(lines) if line.rstrip().endswith(TRACEBACK))
            first = next(heads, len(lines))
            shown, lines = list(lines[:first]), lines[first:]
            self._since = now
        self._lines += lines
        if len(self._lines) > LIMIT or (now - self._since > HOLD and not self.failing):
            shown += self.let_go()
        return shown

    def let_go(self) -> list[str]:
        """All that were kept back."""
        lines, self._lines = self._lines, []
        return lines
