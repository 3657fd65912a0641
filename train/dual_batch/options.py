"""What follows from the trainer's options in a dual-batch run: each process's device, and the plan."""

from __future__ import annotations

from collections.abc import Callable

from train.config import Config
from train.dual_batch.plan import Cost, DualBatchPlan, plan_dual_batch
from train.errors import TrainError

# how a variant makes sizes whole numbers
WHOLE: dict[str, Callable[[float], int]] = {"published": int, "follow_up": round}


def device_place(rank: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """The index of the process's GPU and how many its machine needs: the server shares the first, it only validates."""
    beside_server = rank == local_rank  # ranks are counted from the machine of rank 0, the server, on
    return max(local_rank - beside_server, 0), max(local_size - beside_server, 1)


def plan_of(config: Config, workers: int, samples: int) -> DualBatchPlan:
    """Each worker's share. Raises TrainError if there is no valid plan."""
    if len(config.a) != len(config.b):
        raise TrainError(f"--a has {len(config.a)} values and --b {len(config.b)}; give the same number of both")
    costs = [Cost(a, b) for a, b in zip(config.a, config.b, strict=True)]
    if not config.small and costs == [Cost(0, 0)]:
        costs = [Cost(1, 1)]  # equal workers with equal batches: the cost does not matter
    whole = WHOLE[config.variant]
    return plan_dual_batch(workers, config.small, samples, config.batch_size, config.ratio, costs, whole)
