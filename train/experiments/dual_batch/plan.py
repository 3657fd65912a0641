"""Divide samples among workers with small and large batches, so that all finish a round at the same time.

Lu, Liu, Hong, Wu, "Efficient Dual Batch Size Deep Learning for Distributed Parameter Server Systems", COMPSAC 2022. A
batch of B samples costs a*B + b seconds, so d samples in batches of B cost (a + b/B)*d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from train.errors import TrainError


@dataclass(frozen=True)
class Cost:
    """Cost of a batch of B samples on one worker in seconds: a*B + b."""

    a: float  # seconds per sample
    b: float  # seconds per batch, independent of its size

    def seconds_per_sample(self, batch: int) -> float:
        """Return the seconds per sample for this batch size."""
        return self.a + self.b / batch


@dataclass(frozen=True)
class Share:
    """One worker's part of a round."""

    batch: int
    samples: int
    factor: float  # weight of its pushes at the server; 1 for a large batch
    small: bool


@dataclass(frozen=True)
class DualBatchPlan:
    """Shares by worker, small batches first; `large`: each worker's share with a large batch."""

    shares: tuple[Share, ...]
    large: tuple[Share, ...]
    seconds: float  # planned duration of a round

    def to_dict(self) -> dict[str, object]:
        """Return the values to print: a number if all workers of a kind have the same value, else a list by worker."""
        small = [share for share in self.shares if share.small]
        large = [share for share in self.shares if not share.small] or list(self.large)
        return {
            "batch_small": _one_or_all([share.batch for share in small]),
            "batch_large": _one_or_all([share.batch for share in large]),
            "samples_small": _one_or_all([share.samples for share in small]),
            "samples_large": _one_or_all([share.samples for share in large]),
            "factor": _one_or_all([share.factor for share in small]) if small else 1.0,
        }


def _one_or_all(values: Sequence[float]) -> object:
    if not values:
        return 0
    return values[0] if len(set(values)) == 1 else list(values)


def plan_dual_batch(
    workers: int,
    small: int,
    samples: int,
    base_batch: int,
    ratio: float,
    costs: Sequence[Cost],
    whole: Callable[[float], int] = int,
) -> DualBatchPlan:
    """Plan a round in which the first `small` workers use a smaller batch and finish with the others.

    `ratio`: the duration of a round relative to one in which all workers use `base_batch`; the small batches use the
    extra time. `costs`: one for all workers, or one per worker; samples are then also divided by speed (an
    extension: the paper plans for equal workers, for which the results are the same). `whole`: conversion of sizes to
    integers: int truncates, as in the paper; round is used by the follow-up.

    Raises:
        TrainError: there is no valid plan.
    """
    _check(workers, small, samples, base_batch, ratio, costs)
    costs = list(costs) * workers if len(costs) == 1 else list(costs)
    each = [cost.seconds_per_sample(base_batch) for cost in costs]
    # equivalents[i]: speed of all workers together, relative to worker i; exactly `workers` if all are equal
    equivalents = [math.fsum(mine / other for other in each) for mine in each]
    large = [Share(base_batch, whole(ratio * samples / number), 1.0, small=False) for number in equivalents]
    base_seconds = each[0] * samples / equivalents[0]
    seconds = ratio * base_seconds
    rest = samples - sum(share.samples for share in large[small:])
    shares = []
    for worker in range(small):
        equivalent = math.fsum(each[worker] / other for other in each[:small])
        count = whole(rest / equivalent)
        shares.append(_small_share(worker, count, seconds, costs[worker], large[worker].samples, whole))
    return DualBatchPlan((*shares, *large[small:]), tuple(large), seconds)


def _small_share(
    worker: int, count: int, seconds: float, cost: Cost, large_samples: int, whole: Callable[[float], int]
) -> Share:
    if count <= 0 or large_samples <= 0:
        raise TrainError(
            f"worker {worker} would get {max(count, 0)} samples per round: too few samples for this number of "
            f"workers; use more samples or fewer workers"
        )
    batch = whole(cost.b / (seconds / count - cost.a))
    if batch < 1:
        raise TrainError(
            f"worker {worker}'s small batch would be less than 1: the ratio gives more time than batches of one sample "
            f"need; lower the ratio"
        )
    return Share(batch, count, count / large_samples, small=True)


def _check(workers: int, small: int, samples: int, base_batch: int, ratio: float, costs: Sequence[Cost]) -> None:
    for name, value in (("workers", workers), ("samples", samples), ("large batch", base_batch)):
        if value < 1:
            raise TrainError(f"{name} {value}: must be at least 1")
    if not 0 <= small <= workers:
        raise TrainError(f"small {small}: must be 0 to {workers}, the number of workers")
    if len(costs) not in (1, workers):
        raise TrainError(f"a and b: {len(costs)} values for {workers} workers; specify one value, or one per worker")
    for cost in costs:
        if not (0 < cost.a < math.inf and 0 < cost.b < math.inf):
            raise TrainError(
                f"a {cost.a}, b {cost.b}: both must be greater than 0; to measure them, run: "
                f"python -m train dual-batch fit"
            )
    if not 0 < ratio < math.inf:
        raise TrainError(f"ratio {ratio}: must be greater than 0")
    if small and ratio <= 1:
        raise TrainError(f"ratio {ratio}: must be greater than 1, because small batches need the extra time")
    if 0 < small < workers and ratio >= workers / (workers - small):
        raise TrainError(
            f"ratio {ratio}: must be less than {workers}/{workers - small} = {workers / (workers - small):.4g}, else "
            f"the {workers - small} large workers take all {samples} samples"
        )
