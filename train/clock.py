"""Timing of an interval of steps."""

from __future__ import annotations

import time
from collections.abc import Iterator

from train.data.batch import Batch
from train.own_work import OwnWork


class Clock:
    """Duration of an interval, the time spent waiting for data, and the number of images of all ranks."""

    def __init__(self, own_work: OwnWork) -> None:
        """`own_work`: called when a batch is requested and when it arrives."""
        self.waited, self.images = 0.0, 0
        self.own_work = own_work
        self._start = time.perf_counter()

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, counting the time until each one arrives as waiting."""
        while True:
            requested = time.perf_counter()
            self.own_work.request()
            batch = next(batches, None)
            waited = time.perf_counter() - requested
            self.waited += waited
            if batch is None:
                return
            self.own_work.arrive(waited)
            yield batch

    def restart(self) -> tuple[float, float]:
        """Start a new interval; return images/s and seconds of the old one."""
        now = time.perf_counter()
        seconds, images = max(now - self._start, 1e-9), self.images
        self._start, self.waited, self.images = now, 0.0, 0
        return images / seconds, seconds
