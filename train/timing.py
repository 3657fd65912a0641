"""Time of an interval of steps, and of each rank's own work in it: data loading, transfer, and the forward pass.

On a CPU own work is measured by the clock, on a GPU by events in the compute stream, which are read after they have
occurred, without waiting. On a GPU, data wait is the part of the wait for a batch during which the GPU was idle, and
transfer the rest of the time until the batch can be used.

The backward pass is not measured: its all-reduce waits for the slowest rank, so it ends at the same time on all ranks.
A rank that is slow only in its backward pass or update is not detected, nor is a slow link, which delays all ranks. A
forward pass that waits for other ranks (synchronised batch norm, --parallel fsdp) is not counted either.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from train.data.batch import Batch
from train.metrics import read_late
from train.stragglers import KINDS

Mark = Any  # a point in time: seconds of time.perf_counter, or a torch.cuda.Event


class _Batch(NamedTuple):
    """Points in time of one micro-batch; `waited`: seconds on the clock from requested to arrived."""

    waited: float
    requested: Mark
    arrived: Mark
    computed: Mark


class OwnWork:
    """Seconds of each of KINDS on this rank in one interval."""

    def __init__(self, device: torch.device, forward: bool) -> None:
        """`forward`: whether the forward pass counts as own work."""
        self._late, self._forward = read_late(device), forward
        self._waited, self._requested, self._arrived = 0.0, self._mark(), self._mark()
        self._open, self._sums = deque[_Batch](), [0.0] * len(KINDS)

    def request(self) -> None:
        """Record that the next micro-batch is requested."""
        self._requested = self._mark()

    def arrive(self, waited: float) -> None:
        """Record that it arrived after `waited` seconds; on a GPU, that its copy is queued."""
        self._waited, self._arrived = waited, self._mark()

    def computed(self) -> None:
        """Record that its forward pass is done; on a GPU, that it is queued."""
        end = self._mark() if self._forward else self._arrived
        self._open.append(_Batch(self._waited, self._requested, self._arrived, end))
        while self._open and (not self._late or self._open[0].computed.query()):
            self._add(self._open.popleft())

    def seconds(self) -> list[float]:
        """Return the seconds of each of KINDS; on a GPU, once the interval has been computed."""
        while self._open:
            self._add(self._open.popleft())
        return self._sums

    def _mark(self) -> Mark:
        if not self._late:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's stub
        event.record()
        return event

    def _add(self, batch: _Batch) -> None:
        arrival, forward = self._between(batch.requested, batch.arrived), self._between(batch.arrived, batch.computed)
        data = min(batch.waited, arrival) if self._late else arrival
        for index, seconds in enumerate((data, arrival - data, forward)):
            self._sums[index] += seconds

    def _between(self, begin: Mark, end: Mark) -> float:
        return float(begin.elapsed_time(end)) / 1000 if self._late else float(end - begin)


class Figures(NamedTuple):
    """A rank's figures of an interval, as all ranks get them."""

    waited: float  # seconds
    data: float  # seconds, of each of KINDS
    transfer: float
    forward: float
    idle_ports: float  # see `infiniband.Ports.check`
    active_ports: float

    @property
    def work(self) -> tuple[float, ...]:
        """Seconds of each of KINDS."""
        return self.data, self.transfer, self.forward

    @property
    def ports(self) -> tuple[float, float]:
        return self.idle_ports, self.active_ports


@dataclass(frozen=True)
class Took:
    """An interval that has ended."""

    seconds: float
    images_per_s: float  # of all ranks
    waited: float  # seconds until batches arrived, of this rank
    own: OwnWork
    ports: tuple[float, float]

    def figures(self) -> Figures:
        """Return this rank's figures; on a GPU, once the interval has been computed."""
        data, transfer, forward = self.own.seconds()
        return Figures(self.waited, data, transfer, forward, *self.ports)


class Clock:
    """Measures one interval after the other."""

    def __init__(self, device: torch.device, forward: bool, kind: type[OwnWork] = OwnWork) -> None:
        """`forward`: whether the forward pass is a rank's own work."""
        self._device, self._forward, self._kind = device, forward, kind
        self._begin()

    def _begin(self) -> None:
        self.images, self._waited, self._start = 0, 0.0, time.perf_counter()
        self._own = self._kind(self._device, self._forward)

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, counting the time until each one arrives as waiting."""
        while True:
            requested = time.perf_counter()
            self._own.request()
            batch = next(batches, None)
            waited = time.perf_counter() - requested
            self._waited += waited
            if batch is None:
                return
            self._own.arrive(waited)
            yield batch

    def computed(self) -> None:
        """Record the end of a forward pass."""
        self._own.computed()

    def restart(self, ports: tuple[float, float] = (0.0, 0.0)) -> Took:
        """End the interval, whose steps had `images` images on all ranks, and begin the next one."""
        seconds = max(time.perf_counter() - self._start, 1e-9)
        took = Took(seconds, self.images / seconds, self._waited, self._own, ports)
        self._begin()
        return took
