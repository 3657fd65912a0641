"""A progress line that renews itself, for a person at a terminal; nothing anywhere else."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

WIDTH = 24  # of the bar itself, characters
EVERY = 0.1  # seconds between two pictures of it
CLEAR = "\x1b[K"  # what is right of the cursor


class Bar:
    """Leaves the cursor at the line's beginning, so that whatever is printed next takes the line over."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._shown = self._stream.isatty()
        self._drawn = 0.0
        self._begun: tuple[float, int] | None = None

    def step(self, epoch: int, epochs: int, step: int, steps: int) -> None:
        """Step `step` of all `steps` is done, in epoch `epoch` (1 first)."""
        if not self._shown:
            return
        now = time.monotonic()
        begun, first = self._begun = self._begun or (now, step)
        if now - self._drawn < EVERY and step < steps:
            return
        self._drawn = now
        done = round(WIDTH * step / steps)
        left = (now - begun) / (step - first) * (steps - step) if step > first else None
        text = (
            f"epoch {epoch}/{epochs} [{'#' * done}{'.' * (WIDTH - done)}] step {step:,}/{steps:,} {step / steps:.0%}"
            f"{f'  ETA {clock(left)}' if left is not None else ''}"
        )
        columns = shutil.get_terminal_size().columns
        self._stream.write(f"{text[: columns - 1]}{CLEAR}\r")
        self._stream.flush()

    def clear(self) -> None:
        """Before a line of text."""
        if self._shown and self._begun:
            self._stream.write(CLEAR)


def clock(seconds: float) -> str:
    """0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
