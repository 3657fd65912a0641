"""Device and plan of each process in a dual-batch run, from the trainer's options."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from train.config import Config
from train.errors import TrainError
from train.experiments.dual_batch.plan import Cost, DualBatchPlan, plan_dual_batch

# conversion of sizes to integers, by variant
WHOLE: dict[str, Callable[[float], int]] = {"published": int, "follow_up": round}


def device_index(rank: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """Return the index of the process's GPU and the number of GPUs its machine needs; the server shares the first."""
    with_server = rank == local_rank  # true only on the machine of rank 0, the server
    return max(local_rank - with_server, 0), max(local_size - with_server, 1)


def costs_of(a: Sequence[float], b: Sequence[float]) -> list[Cost]:
    """Return the costs from the options. Raises TrainError if a and b have different lengths."""
    if len(a) != len(b):
        raise TrainError(f"a has {len(a)} values, b has {len(b)}: specify the same number of values")
    return [Cost(*pair) for pair in zip(a, b, strict=True)]


def plan_of(config: Config, workers: int, samples: int) -> DualBatchPlan:
    """Return the plan with each worker's share. Raises TrainError if there is no valid plan."""
    costs = costs_of(config.dual_a, config.dual_b)
    if not config.dual_small and costs == [Cost(0, 0)]:
        costs = [Cost(1, 1)]  # equal workers with equal batches: any cost gives the same plan
    whole = WHOLE[config.dual_variant]
    return plan_dual_batch(workers, config.dual_small, samples, config.batch_size, config.dual_ratio, costs, whole)
