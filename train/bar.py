"""A progress bar, shown only if the output is a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

WIDTH = 24  # of the bar itself, characters
EVERY = 0.1  # seconds between two redraws
CLEAR = "\x1b[K"  # clears the line right of the cursor


class Bar:
    """Leaves the cursor at the beginning of the line, so that the next output overwrites the bar."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._shown = self._stream.isatty()
        self._drawn = 0.0
        self._begun: tuple[float, int] | None = None

    def step(self, epoch: int, epochs: int, step: int, steps: int) -> None:
        """Shows that step `step` of `steps` in all is done, in epoch `epoch` (counted from 1)."""
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
        """Removes the bar before a line of text is printed."""
        if self._shown and self._begun:
            self._stream.write(CLEAR)


def clock(seconds: float) -> str:
    """0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
