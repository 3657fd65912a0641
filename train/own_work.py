"""How long a rank works by itself in each step: until its data are here, on the device, and the model has its output.

On a CPU by the clock. On a GPU by events in the stream that computes, which are read when they have happened: nothing
waits for them. Data wait is then the part of the wait for the batch in which the GPU had nothing to compute, and
transfer the rest of the time until the batch can be used.

The backward pass is not measured: its all-reduce waits for the slowest rank, so it ends at the same time on all ranks.
A rank that is slow in its backward pass or update alone is not seen, nor a slow link, which delays all ranks alike. A
forward pass that waits for other ranks (synchronised batch norm, --parallel fsdp) does not count either.
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

Mark = Any  # a moment: seconds of time.perf_counter, or a torch.cuda.Event


class _Batch(NamedTuple):
    """The moments of one micro-batch; `waited`: seconds on the clock from asked to arrived."""

    waited: float
    asked: Mark
    arrived: Mark
    computed: Mark


class OwnWork:
    """The seconds of each of KINDS, on this rank, in the intervals of an epoch."""

    def __init__(self, device: torch.device, forward: bool) -> None:
        """`forward`: whether the forward pass is own work."""
        self._late, self._forward = read_late(device), forward
        self._waited, self._asked, self._arrived = 0.0, self._mark(), self._mark()
        self._open, self._sums = deque[_Batch](), [0.0] * len(KINDS)

    def ask(self) -> None:
        """The next micro-batch is asked for."""
        self._asked = self._mark()

    def arrive(self, waited: float) -> None:
        """It is here, after `waited` seconds; on a GPU its copy is queued."""
        self._waited, self._arrived = waited, self._mark()

    def computed(self) -> None:
        """Its forward pass is done; on a GPU it is queued."""
        end = self._mark() if self._forward else self._arrived
        self._open.append(_Batch(self._waited, self._asked, self._arrived, end))
        while self._open and (not self._late or self._open[0].computed.query()):
            self._add(self._open.popleft(), self._sums)

    def restart(self) -> Callable[[], list[float]]:
        """Begins a new interval; the result gives the old one's seconds, once the device has computed it."""
        still, sums = self._open, self._sums
        self._open, self._sums = deque(), [0.0] * len(KINDS)

        def read() -> list[float]:
            while still:
                self._add(still.popleft(), sums)
            return sums

        return read

    def _mark(self) -> Mark:
        if not self._late:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's stub
        event.record()
        return event

    def _add(self, batch: _Batch, sums: list[float]) -> None:
        arrival, forward = self._seconds(batch.asked, batch.arrived), self._seconds(batch.arrived, batch.computed)
        data = min(batch.waited, arrival) if self._late else arrival
        for place, seconds in enumerate((data, arrival - data, forward)):
            sums[place] += seconds

    def _seconds(self, begin: Mark, end: Mark) -> float:
        return float(begin.elapsed_time(end)) / 1000 if self._late else float(end - begin)


def node_name() -> str:
    """The node's name in the launcher's job; the machine's without the launcher."""
    return os.environ.get("LAUNCHER_NODE") or socket.gethostname()
