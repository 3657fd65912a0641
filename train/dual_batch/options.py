"""What follows from the trainer's options in a dual-batch run: each process's device, and the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from train.config import Config
from train.dual_batch.plan import Cost, DualBatchPlan, plan_dual_batch
from train.errors import TrainError
from train.parallel.abilities import Abilities


def problems(config: Config, processes: int) -> Iterator[str]:
    """Why these options are refused on so many processes."""
    if processes == 1:
        yield "--parallel dual_batch: one process serves, the others are workers; start two or more"
    if config.schedule != "multistep":
        yield f"--parallel dual_batch needs --schedule multistep, as published, not {config.schedule}"


ABILITIES = Abilities(
    frozenset(
        {"amp", "accumulate", "ema_decay", "syncbn", "compile", "mixup", "cutmix", "repeats"}
        | {"checkpoint_every", "replicate", "pretrained", "evaluate"}
    ),
    problems,
)

# how a variant makes sizes whole numbers
WHOLE: dict[str, Callable[[float], int]] = {"published": int, "follow_up": round}


def device_place(rank: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """The index of the process's GPU and how many its machine needs: the server shares the first, it only validates."""
    beside_server = rank == local_rank  # ranks are counted from the machine of rank 0, the server, on
    return max(local_rank - beside_server, 0), max(local_size - beside_server, 1)


def costs_of(a: Sequence[float], b: Sequence[float]) -> list[Cost]:
    """The costs that the options give. Raises TrainError if their numbers differ."""
    if len(a) != len(b):
        raise TrainError(f"a has {len(a)} values and b has {len(b)}: give the same number of both")
    return [Cost(*pair) for pair in zip(a, b, strict=True)]


def plan_of(config: Config, workers: int, samples: int) -> DualBatchPlan:
    """Each worker's share. Raises TrainError if there is no valid plan."""
    costs = costs_of(config.dual_a, config.dual_b)
    if not config.dual_small and costs == [Cost(0, 0)]:
        costs = [Cost(1, 1)]  # equal workers with equal batches: the cost does not matter
    whole = WHOLE[config.dual_variant]
    return plan_dual_batch(workers, config.dual_small, samples, config.batch_size, config.dual_ratio, costs, whole)
