"""Checkpoints within an epoch, after a number of steps or after a time on rank 0's clock."""

from __future__ import annotations

import re
import time

from train.errors import TrainError

SECONDS = {"s": 1, "m": 60, "h": 3600}


class Every:
    """--checkpoint-every: steps, such as `500`, or a time, such as `5m`; empty: never."""

    def __init__(self, text: str) -> None:
        """Raises TrainError if `text` is neither steps nor a time."""
        match = re.fullmatch(r"([1-9]\d*)([smh]?)", text or "1")
        if match is None:
            raise TrainError(f"--checkpoint-every {text}: neither steps, such as 500, nor a time, such as 5m")
        number, unit = int(match[1]), match[2]
        self._steps = number if text and not unit else 0
        self._seconds = number * SECONDS[unit] if unit else 0
        self._since = time.monotonic()

    def steps_done(self, step: int) -> bool:
        """Whether a checkpoint is due after this step of the run; the same on all ranks."""
        return bool(self._steps) and step > 0 and step % self._steps == 0

    def time_is_up(self) -> bool:
        """Whether the time has passed. If so, the clock restarts."""
        if not self._seconds or time.monotonic() - self._since < self._seconds:
            return False
        self._since = time.monotonic()
        return True
