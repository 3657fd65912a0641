"""Loss, accuracy and speed, exact on any number of ranks because sums and counts are reduced, not averages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from train.data import sampler
from train.distributed.world import World
from train.errors import TrainError

T = TypeVar("T")


def counts(logits: Tensor, labels: Tensor, losses: Tensor, weights: Tensor) -> Tensor:
    """Return (4,) float64: loss sum, top-1 hits, top-5 hits, images. Images with weight 0 do not count.

    `logits` (n, classes), the others (n,). n may be 0.
    """
    valid = weights > 0
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    hits = (best == labels[:, None]) & valid[:, None]
    sums = (losses.double() * weights).sum(), hits[:, 0].sum(), hits.sum(), valid.sum()
    return torch.stack([value.double() for value in sums])


def validation_indices(mode: str, count: int, world: World, batch: int) -> tuple[sampler.Indices, int]:
    """Return this rank's share of `count` validation images, and the number of batches, the same on every rank.

    Every image is in exactly one share. exact: every rank computes its share, in proportion to the ranks' `batch`
    sizes. scatter: rank 0 sends each rank equally many indices, padded at the end, and the number of valid ones (as in
    experiment 3: one more transfer, the same result).
    """
    sizes = world.gather(batch) if world.sharded else [batch]
    shares = sampler.validation_shares(count, sizes)
    if mode == "exact" or world.data_shards == 1:
        return shares[world.shard], max(-(-len(share) // size) for share, size in zip(shares, sizes, strict=True))
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
    return indices, max(-(-shard // size) for size in sizes)


@dataclass(frozen=True)
class Scores:
    """Averages over `images` images; accuracies in percent."""

    loss: float
    top1: float
    top5: float
    images: int

    @staticmethod
    def of(sums: Tensor) -> Scores:
        """Compute averages from the (4,) sums of `counts`."""
        loss, right, right5, images = sums.tolist()
        count = max(images, 1)
        return Scores(loss / count, 100 * right / count, 100 * right5 / count, int(images))


NO_SCORES = Scores(0.0, 0.0, 0.0, 0)


DIVERGED = "training diverged; try a lower --lr, a longer --warmup or --clip-norm 1, or continue with --allow-nan"


def check_finite(scores: Scores, where: str, bad: int = 0) -> None:
    """Raises TrainError if the loss is inf or nan, or `bad` updates were."""
    if not math.isfinite(scores.loss):
        raise TrainError(f"the loss is {scores.loss} at {where}: {DIVERGED}")
    if bad:
        raise TrainError(
            f"a gradient was inf or nan, though the loss was not, in the steps before {where}, none of which is in a "
            f"checkpoint: {DIVERGED}"
        )


def read_late(device: torch.device) -> bool:
    """Whether values are read one interval later, as on a GPU, because reading them would wait for the device."""
    return device.type == "cuda"


class Reading:
    """A tensor being copied to the CPU; `value` waits for the copy."""

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


class HasFigures(Protocol):
    """An interval, as its Meter sees it."""

    def figures(self) -> Sequence[float]:
        """Return this rank's figures, the same number on every rank."""


@dataclass(frozen=True)
class Pending(Generic[T]):
    """An interval that has ended, whose sums may still be on their way from the device."""

    what: T
    sums: Reading
    took: HasFigures | None


@dataclass(frozen=True)
class Closed(Generic[T]):
    """An interval with its values."""

    what: T
    sums: Tensor  # (4,), over all ranks
    figures: Tensor  # (ranks, n)


class Meter(Generic[T]):
    """Sums of an interval and of the epoch so far, over all ranks. `T` says what an interval is, for its report.

    `close`, `flush` and `reduce` are collective: every rank must call them at the same steps.
    """

    def __init__(
        self, world: World, epoch: Tensor | None = None, interval: Tensor | None = None, bad: Tensor | None = None
    ) -> None:
        """`epoch`, `interval`: initial (4,) sums of a resumed run. `bad`: (1,), a count that is read with the sums."""
        self._world, self._late, self._bad = world, read_late(world.device), bad
        self.bad = 0  # of all ranks, as of the last sums that have been reduced
        self.epoch = _zeros() if epoch is None else epoch
        self.interval = _zeros() if interval is None else interval  # as of the last `reduce`
        self._mine: Tensor | None = None
        self._pending: Pending[T] | None = None

    def add(self, sums: Tensor) -> None:
        """Add one step's `counts` of this rank, on the device."""
        self._mine = sums if self._mine is None else self._mine + sums

    def close(self, what: T, took: HasFigures | None = None) -> Closed[T] | None:
        """End an interval; return the interval that can be reported now, with the figures of all ranks.

        On a CPU that is this one; on a GPU the one before, None after the first, as the device has yet to compute this
        one.
        """
        before = self.flush()
        self._pending = Pending(what, self._take(), took)
        return before if self._late else self.flush()

    def flush(self) -> Closed[T] | None:
        """Return the last interval if it has not been returned yet."""
        ended, self._pending = self._pending, None
        if ended is None:
            return None
        figures = self._add_up(ended.sums, ended.took)
        sums, self.interval = self.interval, _zeros()
        self.epoch = self.epoch + sums
        return Closed(ended.what, sums, figures)

    def reduce(self) -> None:
        """Reduce the sums since the last interval or call into `interval`, for a checkpoint within an interval.

        A resumed run then adds the same numbers in the same order. Call after `flush`.
        """
        assert self._pending is None
        self._add_up(self._take())

    def wait(self) -> None:
        """Wait until the device has computed all added values."""
        if self._mine is not None:
            self._mine = self._mine.cpu()

    def _take(self) -> Reading:
        mine, self._mine = self._mine, None
        sums = _zeros() if mine is None else mine
        bad = sums.new_zeros(1) if self._bad is None else self._bad.to(sums.device)
        return Reading(torch.cat([sums, bad]), self._late)

    def _add_up(self, reading: Reading, took: HasFigures | None = None) -> Tensor:
        """Reduce the sums. Figures are gathered by the same collective: each rank adds its own to zeros."""
        sums, own = reading.value(), torch.tensor(took.figures() if took else (), dtype=torch.float64)
        gathered = torch.zeros(self._world.size, len(own), dtype=torch.float64)
        gathered[self._world.rank] = own
        both = self._world.sum(torch.cat([sums, gathered.flatten()]))
        self.interval, self.bad = self.interval + both[:4], int(both[4])
        return both[5:].view(gathered.shape)


def _zeros() -> Tensor:
    return torch.zeros(4, dtype=torch.float64)
