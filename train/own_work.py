"""Time that a rank spends on its own work in each step: data loading, transfer to the device, and the forward pass.

On a CPU it is measured by the clock, on a GPU by events in the compute stream, which are read after they have occurred,
without waiting. On a GPU, data wait is the part of the wait for a batch during which the GPU was idle, and transfer the
rest of the time until the batch can be used.

The backward pass is not measured: its all-reduce waits for the slowest rank, so it ends at the same time on all ranks.
A rank that is slow only in its backward pass or update is not detected, nor is a slow link, which delays all ranks. A
forward pass that waits for other ranks (synchronised batch norm, --parallel fsdp) is not counted either.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

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
    """Seconds of each of KINDS on this rank, by interval of an epoch."""

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
            self._add(self._open.popleft(), self._sums)

    def restart(self) -> Callable[[], list[float]]:
        """Start a new interval; return a function that returns the seconds of the old one."""
        pending, sums = self._open, self._sums
        self._open, self._sums = deque(), [0.0] * len(KINDS)

        def read() -> list[float]:
            while pending:
                self._add(pending.popleft(), sums)
            return sums

        return read

    def _mark(self) -> Mark:
        if not self._late:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's stub
        event.record()
        return event

    def _add(self, batch: _Batch, sums: list[float]) -> None:
        arrival, forward = self._seconds(batch.requested, batch.arrived), self._seconds(batch.arrived, batch.computed)
        data = min(batch.waited, arrival) if self._late else arrival
        for index, seconds in enumerate((data, arrival - data, forward)):
            sums[index] += seconds

    def _seconds(self, begin: Mark, end: Mark) -> float:
        return float(begin.elapsed_time(end)) / 1000 if self._late else float(end - begin)


def node_name() -> str:
    """Return the node's name in the launcher's job; the host name without the launcher."""
    return os.environ.get("LAUNCHER_NODE") or socket.gethostname()
