"""The plan that follows from the trainer's options in a dual-batch run."""

from __future__ import annotations

from collections.abc import Callable

from train.config import Config
from train.dual_batch.plan import Cost, DualBatchPlan, plan_dual_batch
from train.errors import TrainError

# how a variant makes sizes whole numbers
WHOLE: dict[str, Callable[[float], int]] = {"published": int, "follow_up": round}


def plan_of(config: Config, workers: int, samples: int) -> DualBatchPlan:
    """Each worker's share. Raises TrainError if there is no valid plan."""
    if len(config.a) != len(config.b):
        raise TrainError(f"--a has {len(config.a)} values and --b {len(config.b)}; give the same number of both")
    costs = [Cost(a, b) for a, b in zip(config.a, config.b, strict=True)]
    if not config.small and costs == [Cost(0, 0)]:
        costs = [Cost(1, 1)]  # equal workers with equal batches: the cost does not matter
    whole = WHOLE[config.variant]
    return plan_dual_batch(workers, config.small, samples, config.batch_size, config.ratio, costs, whole)
