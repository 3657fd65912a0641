"""The clock of an interval of steps."""

from __future__ import annotations

import time
from collections.abc import Iterator

from train.data.batch import Batch
from train.own_work import OwnWork


class Clock:
    """Time of an interval, how much of it was spent waiting for data, and the images of all ranks in it."""

    def __init__(self, own_work: OwnWork) -> None:
        """`own_work`: gets the moments at which a batch is asked for and arrives."""
        self.waited, self.images = 0.0, 0
        self.own_work = own_work
        self._start = time.perf_counter()

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Passes on the batches; the time until each one arrives counts as waiting."""
        while True:
            asked = time.perf_counter()
            self.own_work.ask()
            batch = next(batches, None)
            waited = time.perf_counter() - asked
            self.waited += waited
            if batch is None:
                return
            self.own_work.arrive(waited)
            yield batch

    def restart(self) -> tuple[float, float]:
        """Starts a new interval; returns images/s and the seconds of the old one."""
        now = time.perf_counter()
        seconds, images = max(now - self._start, 1e-9), self.images
        self._start, self.waited, self.images = now, 0.0, 0
        return images / seconds, seconds
