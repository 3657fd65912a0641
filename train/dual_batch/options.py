"""The trainer's options in a dual-batch run: which ones are supported, and the plan that follows from them."""

from __future__ import annotations

from collections.abc import Callable

from train.config import Config
from train.dual_batch.plan import Cost, DualBatchPlan, plan_dual_batch
from train.errors import TrainError

# how a variant makes sizes whole numbers
WHOLE: dict[str, Callable[[float], int]] = {"published": int, "follow_up": round}


def check(config: Config) -> None:
    """Raises TrainError for options that a dual-batch run would have to ignore."""
    refused = {"--accumulate": config.accumulate > 1, "--ema-decay": config.ema_decay > 0}
    refused |= {"--mixup": config.mixup > 0, "--cutmix": config.cutmix > 0, "--syncbn": config.syncbn != "none"}
    refused |= {"--amp": config.amp in ("fp16", "O1", "O2", "O3"), "--compile": config.compile}
    if found := [name for name, wrong in refused.items() if wrong]:
        raise TrainError(f"--parallel dual_batch does not support {', '.join(found)}; leave it out, or use ddp")
    if config.schedule != "multistep":
        raise TrainError(f"--parallel dual_batch needs --schedule multistep, as published, not {config.schedule}")


def plan_of(config: Config, workers: int, samples: int) -> DualBatchPlan:
    """Each worker's share. Raises TrainError if there is no valid plan."""
    if len(config.a) != len(config.b):
        raise TrainError(f"--a has {len(config.a)} values and --b {len(config.b)}; give the same number of both")
    costs = [Cost(a, b) for a, b in zip(config.a, config.b, strict=True)]
    if not config.small and costs == [Cost(0, 0)]:
        costs = [Cost(1, 1)]  # equal workers with equal batches: the cost does not matter
    whole = WHOLE[config.variant]
    return plan_dual_batch(workers, config.small, samples, config.batch_size, config.ratio, costs, whole)
