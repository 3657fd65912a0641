"""Loss, accuracy and speed, exact on any number of ranks: sums and counts are reduced, never averages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from train.data import sampler
from train.errors import TrainError
from train.parallel.world import World


def counts(logits: Tensor, labels: Tensor, losses: Tensor, weights: Tensor) -> Tensor:
    """(4,) float64: loss sum, top-1 hits, top-5 hits, images; images with weight 0 do not count.

    `logits` (n, classes), the others (n,). n may be 0.
    """
    valid = weights > 0
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = (best == labels[:, None]) & valid[:, None]
    sums = (losses.double() * weights).sum(), hits[:, 0].sum(), hits.sum(), valid.sum()
    return torch.stack([value.double() for value in sums])


def validation_indices(mode: str, count: int, world: World) -> sampler.Indices:
    """This rank's part of `count` validation images; every image is in exactly one part.

    exact: every rank computes its part. scatter: rank 0 sends each rank equally many indices, the last ones padded,
    and how many of them are valid (as in experiment 3: one more transfer, the same result).
    """
    if mode == "exact" or world.data_shards == 1:
        return sampler.validation_share(count, world.shard, world.data_shards)
    shard = -(-count // world.size)
    mine, valid = torch.zeros(shard, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    parts: list[Tensor] | None = None
    valid_counts: list[Tensor] | None = None
    if world.first:
        padded = torch.arange(shard * world.size).clamp_max(count - 1)
        parts = list(padded.view(world.size, shard).unbind())
        valid_counts = [torch.tensor([min(max(count - rank * shard, 0), shard)]) for rank in range(world.size)]
    dist.scatter(mine, parts)
    dist.scatter(valid, valid_counts)
    indices: sampler.Indices = mine[: int(valid)].numpy().astype(np.int64)
    return indices


@dataclass(frozen=True)
class Scores:
    """Averages over `images` images; accuracies in percent."""

    loss: float
    top1: float
    top5: float
    images: int

    @staticmethod
    def of(sums: Tensor) -> Scores:
        """From the (4,) sums of `counts`."""
        loss, right, right5, images = sums.tolist()
        count = max(images, 1)
        return Scores(loss / count, 100 * right / count, 100 * right5 / count, int(images))


NO_SCORES = Scores(0.0, 0.0, 0.0, 0)


def check_finite(scores: Scores, where: str) -> None:
    """Raises TrainError if the loss is inf or nan."""
    if not math.isfinite(scores.loss):
        raise TrainError(
            f"the loss is {scores.loss} at {where}: training has diverged; try a lower --lr, a longer --warmup or "
            f"--clip-norm 1, or go on with --allow-nan"
        )


Report = Callable[[Tensor, Tensor], None]
Figures = Callable[[], Sequence[float]]  # as many on every rank


def read_late(device: torch.device) -> bool:
    """Whether figures are read an interval after they were queued: on a GPU, where reading them waits for it."""
    return device.type == "cuda"


class Reading:
    """A tensor on its way to the CPU. Only `value` waits until it has arrived."""

    def __init__(self, values: Tensor, late: bool) -> None:
        self._values, self._arrived = values, None
        if late:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's stub
            self._arrived.record()

    def value(self) -> Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


class Meter:
    """Sums of an interval and of the epoch so far, over all ranks.

    `close_interval`, `flush` and `reduce` add up the ranks' numbers: every rank calls them at the same steps.
    """

    def __init__(self, world: World, epoch: Tensor | None = None, interval: Tensor | None = None) -> None:
        """`epoch`, `interval`: the (4,) sums with which a resumed run goes on."""
        self._world, self._late = world, read_late(world.device)
        self.epoch = _nothing() if epoch is None else epoch
        self.interval = _nothing() if interval is None else interval  # as of the last `reduce`
        self._mine: Tensor | None = None
        self._pending: tuple[Reading, Figures, Report] | None = None

    def add(self, sums: Tensor) -> None:
        """One step's `counts` of this rank, on the device."""
        self._mine = sums if self._mine is None else self._mine + sums

    def close_interval(self, report: Report = lambda *_: None, figures: Figures = tuple) -> None:
        """Ends an interval; `report` gets its sums over all ranks, and (ranks, n) `figures`, gathered with the sums.

        On a CPU both are called at once; on a GPU when the next interval ends, or by `flush`: then the device has
        computed the interval.
        """
        self.flush()
        self._pending = self._take(), figures, report
        if not self._late:
            self.flush()

    def flush(self) -> None:
        """Reports the interval that was ended last, if that has not been done."""
        if self._pending is None:
            return
        (reading, figures, report), self._pending = self._pending, None
        gathered = self._add_up(reading, figures)
        sums, self.interval = self.interval, _nothing()
        self.epoch = self.epoch + sums
        report(sums, gathered)

    def reduce(self) -> None:
        """Adds what was added since the last interval or call to `interval`, for a checkpoint inside an interval.

        A run resumed from it then adds the same numbers in the same order.
        """
        self.flush()
        self._add_up(self._take())

    def wait(self) -> None:
        """Returns when the device has computed all that was added."""
        if self._mine is not None:
            self._mine = self._mine.cpu()

    def _take(self) -> Reading:
        mine, self._mine = self._mine, None
        return Reading(_nothing() if mine is None else mine, self._late)

    def _add_up(self, reading: Reading, figures: Figures = tuple) -> Tensor:
        """Figures are gathered by the sums' collective: each rank adds its own to the zeros of the others."""
        sums, own = reading.value(), torch.tensor(figures(), dtype=torch.float64)
        gathered = torch.zeros(self._world.size, len(own), dtype=torch.float64)
        gathered[self._world.rank] = own
        both = self._world.sum(torch.cat([sums, gathered.flatten()]))
        self.interval = self.interval + both[:4]
        return both[4:].view(gathered.shape)


def _nothing() -> Tensor:
    return torch.zeros(4, dtype=torch.float64)
