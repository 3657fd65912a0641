"""The parameter server: grants local epochs, merges weights and tracks lost workers. Independent of the network.

All methods are thread-safe and return quickly; methods that wait have a time limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from train.experiments.dual_batch.merge import Weights, merge_all, merge_one
from train.experiments.dual_batch.plan import Share

MAX_WAIT = 2.0  # maximum seconds that a call waits; the caller then retries


@dataclass(frozen=True)
class Grant:
    """Permission to train one local epoch."""

    number: int  # among all grants, counted from 0
    round: int  # a round has as many grants as there are workers, counted from 0
    rate: float
    weights: Weights


@dataclass(frozen=True)
class State:
    """What is done so far."""

    finished: int  # local epochs
    merged: int  # those in the weights; others wait for a synchronous merge
    weights: Weights
    sums: Tensor  # `counts`, since the last call


@dataclass(frozen=True)
class Rates:
    """The learning rate of a grant, as a pure function of its number."""

    first: float
    gamma: float
    drops: tuple[int, ...]  # grants at which the rate is multiplied by gamma

    def __call__(self, number: int) -> float:
        return self.first * self.gamma ** sum(number >= drop for drop in self.drops)


class ParameterServer:
    """Grants local epochs until exactly `total` are finished, even if workers die.

    merge: asp, each push immediately; bsp, when every worker has pushed; ssp, asp until a worker is more than
    `staleness` pushes ahead of another, then one bsp round.
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
        self._alive = dict.fromkeys(range(len(shares)), time.monotonic())  # worker -> time of last heartbeat or call
        self._working: dict[int, int] = {}  # worker -> number of its grant
        self._returned: list[int] = []  # grants of lost workers, to be granted again
        self._gathered: dict[int, Weights] = {}  # worker -> weights for the next synchronous merge
        self._gather = merge == "bsp"
        self._pushes = [0] * len(shares)  # since the last synchronous merge
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._closed = self._stopped = False
        self.granted = done  # local epochs granted and not lost
        self.finished = done
        self.lost: dict[int, str] = {}  # worker -> reason, in order of loss

    def pull(self, worker: int) -> Grant | str:
        """Return a grant, "wait" (call again) or "done" (the run is over)."""
        with self._changed:
            self._seen(worker)
            self._changed.wait_for(lambda: self._ready(worker), MAX_WAIT)
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
        """Accept a local epoch's weights and `counts`. Pushes of lost workers are ignored."""
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

    def heartbeat(self, worker: int) -> None:
        """Record that the worker is alive."""
        with self._changed:
            self._seen(worker)

    def all_joined(self) -> None:
        """Record that all workers have joined: heartbeats are expected from now on."""
        with self._changed:
            self._alive = dict.fromkeys(self._alive, time.monotonic())

    def lose(self, worker: int, why: str) -> None:
        """Remove a lost worker; another worker gets its grant."""
        with self._changed:
            if worker in self._alive:
                del self._alive[worker]
                self.lost[worker] = why
                self._return(worker)
                self._merge_gathered()
                self._changed.notify_all()

    def leave(self, worker: int, stopped: bool = False) -> None:
        """Remove a worker that has finished, or was stopped."""
        with self._changed:
            self._alive.pop(worker, None)
            self._stopped |= stopped
            self._return(worker)
            self._changed.notify_all()

    @property
    def all_stopped(self) -> bool:
        """Whether no worker is left and the run was asked to stop, rather than that it lost all of them."""
        with self._changed:
            return not self._alive and self._stopped

    def silent(self, seconds: float) -> list[int]:
        """Return the workers without a heartbeat or call for `seconds`."""
        with self._changed:
            return [worker for worker, seen in self._alive.items() if time.monotonic() - seen > seconds]

    def close(self) -> None:
        """Stop granting local epochs: the run is being stopped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for(self, finished: int, seconds: float) -> bool:
        """Wait until `finished` local epochs are finished or no worker is left; return False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: self.finished >= finished or not self._alive, seconds)

    def wait_empty(self, seconds: float) -> bool:
        """Wait until every worker has left or is lost; return False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._alive, seconds)

    def state(self) -> State:
        """Return the current state; the sums begin anew."""
        with self._changed:
            sums, self._sums = self._sums, torch.zeros(4, dtype=torch.float64)
            weights = {name: value.clone() for name, value in self._weights.items()}
            return State(self.finished, self.finished - len(self._gathered), weights, sums)

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
        """Whether there is a local epoch to grant and this worker is not waiting for a synchronous merge."""
        return self.granted < self._total and worker not in self._gathered

    def _merge_gathered(self) -> None:
        """Do the synchronous merge once all live workers have pushed, or no more pushes are due."""
        everyone = self._alive.keys() <= self._gathered.keys()
        if not self._gathered or self._working.keys() & self._alive.keys():
            return
        if everyone or self.granted >= self._total:
            pushes = [(weights, self._shares[worker].factor) for worker, weights in sorted(self._gathered.items())]
            self._weights = merge_all(self._weights, pushes)
            self._gathered.clear()
            self._pushes = [0] * len(self._shares)
            self._gather = self._merge == "bsp"
