"""How workers with a small and with a large batch share the samples so that all finish a round at the same time.

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
    """Seconds of a batch of B samples on one worker: a*B + b."""

    a: float  # seconds a sample
    b: float  # seconds a batch, whatever its size

    def seconds_per_sample(self, batch: int) -> float:
        """Of samples that come in batches of that size."""
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
    """The shares by worker, the small batches first; `large` is what each worker would get as a large one."""

    shares: tuple[Share, ...]
    large: tuple[Share, ...]
    seconds: float  # a round lasts, as planned

    def to_dict(self) -> dict[str, object]:
        """As the command prints it: one number where all workers of a kind have the same, else a list by worker."""
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
    """The first `small` of the workers get a batch so small that their round lasts as long as the others'.

    `ratio` is a round's length against the round in which all work with `base_batch`; the extra time is what the small
    batches use. `costs`: one for all workers, or one a worker; then samples go by speed as well (ours: the paper plans
    for equal workers, and for those the results are its own, truncations included). `whole`: how sizes become whole
    numbers; int cuts, as the paper does, round is the follow-up's.

    Raises:
        TrainError: no such plan exists; the message says why.
    """
    _check(workers, small, samples, base_batch, ratio, costs)
    costs = list(costs) * workers if len(costs) == 1 else list(costs)
    each = [cost.seconds_per_sample(base_batch) for cost in costs]
    # turns[i]: how many workers like i all workers together are; exactly `workers` where all are equal
    turns = [math.fsum(mine / other for other in each) for mine in each]
    large = [Share(base_batch, whole(ratio * samples / turn), 1.0, small=False) for turn in turns]
    base_seconds = each[0] * samples / turns[0]
    seconds = ratio * base_seconds
    rest = samples - sum(share.samples for share in large[small:])
    shares = []
    for worker in range(small):
        turn = math.fsum(each[worker] / other for other in each[:small])
        count = whole(rest / turn)
        shares.append(_small_share(worker, count, seconds, costs[worker], large[worker].samples, whole))
    return DualBatchPlan((*shares, *large[small:]), tuple(large), seconds)


def _small_share(
    worker: int, count: int, seconds: float, cost: Cost, large_samples: int, whole: Callable[[float], int]
) -> Share:
    if count <= 0 or large_samples <= 0:
        raise TrainError(
            f"worker {worker} would get {max(count, 0)} samples a round: too few samples for so many workers; "
            f"give more samples, or fewer workers"
        )
    batch = whole(cost.b / (seconds / count - cost.a))
    if batch < 1:
        raise TrainError(
            f"worker {worker}'s small batch would be below 1: the extra time is more than batches of one sample use; "
            f"lower --ratio"
        )
    return Share(batch, count, count / large_samples, small=True)


def _check(workers: int, small: int, samples: int, base_batch: int, ratio: float, costs: Sequence[Cost]) -> None:
    for name, value in (("--workers", workers), ("--samples", samples), ("--base-batch", base_batch)):
        if value < 1:
            raise TrainError(f"{name} {value}: must be at least 1")
    if not 0 <= small <= workers:
        raise TrainError(f"--small {small}: must be 0 to {workers}, the number of workers")
    if len(costs) not in (1, workers):
        raise TrainError(f"--a and --b: {len(costs)} values for {workers} workers; give one for all, or one each")
    for cost in costs:
        if not (0 < cost.a < math.inf and 0 < cost.b < math.inf):
            raise TrainError(
                f"--a {cost.a} --b {cost.b}: both must be above 0, else no batch size takes a given time; "
                f"`python -m train dual-batch fit` measures them"
            )
    if not 0 < ratio < math.inf:
        raise TrainError(f"--ratio {ratio}: must be above 0")
    if small and ratio <= 1:
        raise TrainError(f"--ratio {ratio}: must be above 1: the extra time is what the small batches use")
    if 0 < small < workers and ratio >= workers / (workers - small):
        raise TrainError(
            f"--ratio {ratio}: at {workers}/{workers - small} = {workers / (workers - small):.4g} and above the "
            f"{workers - small} large workers take all {samples} samples and the small ones get none; lower it"
        )
