"""--parallel: each method is a module with ABILITIES and `make_step`."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from train.config import Config
from train.parallel import dp
from train.parallel.abilities import Abilities
from train.parallel.world import World
from train.precision import Precision
from train.step import Step

# imported when selected: some import parts of torch that take a second
MODULES = {
    "single": "train.parallel.ddp",
    "ddp": "train.parallel.ddp",
    "dp": "train.parallel.dp",
    "fsdp": "train.parallel.fsdp",
    "model": "train.parallel.model",
    "pipeline": "train.parallel.pipeline",
    "dual_batch": "train.dual_batch.options",  # only ABILITIES: its workers create their own steps
}


def method(config: Config, world: World) -> str:
    """Return the parallel method; auto is ddp with several processes, else single."""
    if config.parallel != "auto":
        return config.parallel
    return "ddp" if world.size > 1 else "single"


def abilities(kind: str) -> Abilities:
    """Return the abilities of a method, which must not be auto."""
    found: Abilities = _module(kind).ABILITIES
    return found


def device_count(config: Config, world: World) -> int:
    """Return the number of devices in use, which may differ from the number of processes."""
    return dp.devices(config, world) if method(config, world) == "dp" else world.size


def make_step(config: Config, world: World, precision: Precision, model: nn.Module) -> Step:
    """Return the step for the method.

    Raises:
        TrainError: the model cannot be split into stages, or there are too few devices.
    """
    step: Step = _module(method(config, world)).make_step(config, world, precision, model)
    return step


def _module(kind: str) -> Any:
    return importlib.import_module(MODULES[kind])
