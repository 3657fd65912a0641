"""Loss, accuracy and speed, exact on any number of ranks: sums and counts are reduced, never averages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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


def check_finite(scores: Scores, where: str) -> None:
    """Raises TrainError if the loss is inf or nan."""
    if not math.isfinite(scores.loss):
        raise TrainError(
            f"the loss is {scores.loss} at {where}: training has diverged; try a lower --lr, a longer --warmup or "
            f"--clip-norm 1, or go on with --allow-nan"
        )


@dataclass
class Meter:
    """Sums of an interval and of the epoch so far; stays on the device until it is read."""

    world: World
    epoch: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    interval: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))  # reduced at a checkpoint
    _mine: Tensor | None = None

    def add(self, sums: Tensor) -> None:
        """One step's sums of this rank."""
        self._mine = sums if self._mine is None else self._mine + sums

    def reduce(self, waited: float = 0.0) -> float:
        """Adds what this rank has added since the last call to `interval`, and that of all other ranks.

        A checkpoint inside an interval calls it too, so that a resumed run adds the same numbers in the same order.
        Returns `waited` seconds over all ranks. Every rank calls it.
        """
        mine = torch.zeros(4, dtype=torch.float64) if self._mine is None else self._mine.cpu()
        both = self.world.sum(torch.cat([mine, torch.tensor([waited], dtype=torch.float64)]))
        self._mine, self.interval = None, self.interval + both[:4]
        return float(both[4])

    def read(self, waited: float) -> tuple[Tensor, float]:
        """The interval's sums and `waited` seconds, both over all ranks; starts a new interval. Every rank calls it."""
        waited = self.reduce(waited)
        sums, self.interval = self.interval, torch.zeros(4, dtype=torch.float64)
        self.epoch = self.epoch + sums
        return sums, waited
