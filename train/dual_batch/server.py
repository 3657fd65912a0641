"""The parameter server: grants local epochs, takes weights in, notices workers that are gone. Knows no network.

Every method is called from several threads and returns soon; one that has to wait does so for a slice of time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train.dual_batch.merge import Weights, merge_all, merge_one
from train.dual_batch.plan import Share

SLICE = 2.0  # seconds a call waits at most; the caller asks again


@dataclass(frozen=True)
class Grant:
    """Leave to do one local epoch."""

    number: int  # of all grants, 0 first
    round: int  # as many grants as there are workers, 0 first
    rate: float
    weights: Weights


@dataclass(frozen=True)
class Rates:
    """The learning rate of a grant: a pure function of its number."""

    first: float
    gamma: float
    drops: tuple[int, ...]  # grants from which on it is multiplied once more

    def __call__(self, number: int) -> float:
        return self.first * self.gamma ** sum(number >= drop for drop in self.drops)


class ParameterServer:
    """Gives out exactly `total` local epochs that are finished, whichever workers die on the way.

    merge: asp, each push at once; bsp, when every worker has pushed; ssp, asp until a worker is more than `staleness`
    pushes ahead of another, then one bsp round.
    """

    def __init__(
        self,
        weights: Weights,
        shares: Sequence[Share],
        total: int,
        rates: Rates,
        merge: str,
        staleness: int,
        done: int,
        variant: str = "published",
    ) -> None:
        self._weights = {name: value.clone() for name, value in weights.items()}
        self._shares, self._total, self._rates = shares, total, rates
        self._merge, self._staleness, self._variant = merge, staleness, variant
        self._changed = threading.Condition()
        self._alive = dict.fromkeys(range(len(shares)), time.monotonic())  # worker -> last sign of life
        self._working: dict[int, int] = {}  # worker -> number of its grant
        self._returned: list[int] = []  # numbers of grants whose worker is gone
        self._gathered: dict[int, Weights] = {}  # what waits for the synchronous merge
        self._gather = merge == "bsp"
        self._pushes = [0] * len(shares)  # since the last synchronous merge
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._closed = False
        self.granted = done  # local epochs begun and not lost
        self.finished = done
        self.lost: dict[int, str] = {}  # worker -> why, in the order in which they went

    def pull(self, worker: int) -> Grant | str:
        """A grant; `wait`: ask again; `done`: go."""
        with self._changed:
            self._seen(worker)
            self._changed.wait_for(lambda: self._ready(worker), SLICE)
            if self._closed or worker not in self._alive or self.finished >= self._total:
                return "done"
            if not self._may_work(worker):
                return "wait"
            number = self._returned.pop(0) if self._returned else self.granted
            self.granted += 1
            self._working[worker] = number
            weights = {name: value.clone() for name, value in self._weights.items()}
            return Grant(number, number // len(self._shares), self._rates(number), weights)

    def push(self, worker: int, weights: Weights, sums: Tensor) -> None:
        """A local epoch's weights and its `counts`. What comes from a worker given up on is left."""
        with self._changed:
            self._seen(worker)
            if worker not in self._alive or worker not in self._working:
                return
            del self._working[worker]
            self.finished += 1
            self._sums = self._sums + sums
            self._pushes[worker] += 1
            if self._gather:
                self._gathered[worker] = weights
            else:
                self._weights = merge_one(self._weights, weights, self._shares[worker].factor, self._variant)
                alive = [self._pushes[other] for other in self._alive]
                self._gather = self._merge == "ssp" and max(alive) - min(alive) > self._staleness
            self._merge_gathered()
            self._changed.notify_all()

    def beat(self, worker: int) -> None:
        """A sign of life."""
        with self._changed:
            self._seen(worker)

    def all_met(self) -> None:
        """Every worker is there: from now on silence counts."""
        with self._changed:
            self._alive = dict.fromkeys(self._alive, time.monotonic())

    def lose(self, worker: int, why: str) -> None:
        """The worker is gone; its grant goes to the others."""
        with self._changed:
            if worker in self._alive:
                del self._alive[worker]
                self.lost[worker] = why
                self._return(worker)
                self._merge_gathered()
                self._changed.notify_all()

    def leave(self, worker: int) -> None:
        """The worker ends as it should."""
        with self._changed:
            self._alive.pop(worker, None)
            self._return(worker)
            self._changed.notify_all()

    def silent(self, patience: float) -> list[int]:
        """Workers that gave no sign of life for so many seconds."""
        with self._changed:
            return [worker for worker, seen in self._alive.items() if time.monotonic() - seen > patience]

    def close(self) -> None:
        """No more grants: the run is stopped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for(self, finished: int, seconds: float) -> bool:
        """Until so many local epochs are in (and merged), or no worker is left; False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self.finished >= finished or not self._alive, seconds)

    def wait_empty(self, seconds: float) -> bool:
        """Until every worker has left or is lost; False if it takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._alive, seconds)

    def state(self) -> tuple[int, Weights, Tensor]:
        """Local epochs finished, the weights, and the sums of the local epochs since the last call."""
        with self._changed:
            sums, self._sums = self._sums, torch.zeros(4, dtype=torch.float64)
            return self.finished, {name: value.clone() for name, value in self._weights.items()}, sums

    @property
    def abandoned(self) -> bool:
        """Nobody is left to work."""
        with self._changed:
            return not self._alive

    def _seen(self, worker: int) -> None:
        if worker in self._alive:
            self._alive[worker] = time.monotonic()

    def _return(self, worker: int) -> None:
        if worker in self._working:
            self._returned.append(self._working.pop(worker))
            self._returned.sort()
            self.granted -= 1

    def _ready(self, worker: int) -> bool:
        over = self._closed or worker not in self._alive or self.finished >= self._total
        return over or self._may_work(worker)

    def _may_work(self, worker: int) -> bool:
        """There is something to grant, and this worker does not wait for a synchronous merge."""
        return self.granted < self._total and worker not in self._gathered

    def _merge_gathered(self) -> None:
        """The synchronous merge, once all who are there have pushed, or nothing is left to be pushed."""
        everyone = self._alive.keys() <= self._gathered.keys()
        if not self._gathered or self._working.keys() & self._alive.keys():
            return
        if everyone or self.granted >= self._total:
            pushes = [(weights, self._shares[worker].factor) for worker, weights in sorted(self._gathered.items())]
            self._weights = merge_all(self._weights, pushes)
            self._gathered.clear()
            self._pushes = [0] * len(self._shares)
            self._gather = self._merge == "bsp"
