"""--parallel: each method is a module with `make_step`, and `lacking` if not every torch has what it needs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from train.config import Config
from train.distributed.world import World
from train.errors import TrainError
from train.precision import Precision
from train.step import Step
from train.store import Files, Store

# imported when selected: some import parts of torch that take a second
MODULES = {
    "single": "train.distributed.ddp",
    "ddp": "train.distributed.ddp",
    "dp": "train.experiments.dp",
    "fsdp": "train.distributed.fsdp",
    "hsdp": "train.distributed.fsdp",
    "model": "train.experiments.model",
    "pipeline": "train.experiments.pipeline",
}


def method(config: Config, world: World) -> str:
    """Return the parallel method; auto is ddp with several processes, else single."""
    if config.parallel != "auto":
        return config.parallel
    return "ddp" if world.size > 1 else "single"


def check_torch(config: Config, kind: str) -> None:
    """Raise TrainError if this torch lacks what the method, which must not be auto, needs."""
    module = _module(kind)
    for problem in module.lacking(config) if hasattr(module, "lacking") else ():
        raise TrainError(problem)


def device_count(config: Config, world: World) -> int:
    """Return the number of devices in use, which may differ from the number of processes."""
    kind = method(config, world)
    return int(_module(kind).devices(config, world)) if kind == "dp" else world.size


def make_step(config: Config, world: World, precision: Precision, model: nn.Module) -> Step:
    """Return the step for the method.

    Raises:
        TrainError: the model cannot be split into stages, or there are too few devices.
    """
    step: Step = _module(method(config, world)).make_step(config, world, precision, model)
    return step


def make_store(config: Config, world: World, say: Callable[[str], None]) -> Store:
    """Return the store of the run's checkpoints. say: prints a line on rank 0."""
    if config.shards_weights:
        from train.distributed.shards import Shards  # imports torch.distributed.checkpoint, which takes a second

        return Shards(config, world, say)
    return Files(config, world, say)


def _module(kind: str) -> Any:
    return importlib.import_module(MODULES[kind])
