"""--parallel: chooses the kind of training step."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from train.config import Config
from train.parallel import ddp, dp
from train.parallel.world import World
from train.precision import InContext, Precision
from train.step import Step


def method(config: Config, world: World) -> str:
    """The parallel method; auto is ddp on several processes, else single."""
    if config.parallel != "auto":
        return config.parallel
    return "ddp" if world.size > 1 else "single"


def device_count(config: Config, world: World) -> int:
    """The number of devices that share the work, which may differ from the number of processes."""
    return dp.devices(config, world) if method(config, world) == "dp" else world.size


def make_step(config: Config, world: World, precision: Precision, model: nn.Module) -> Step:
    """The step for the method.

    Raises:
        TrainError: the model cannot be cut into stages, or there are too few devices.
    """
    kind = method(config, world)
    if kind == "model":
        from train.parallel.model import StageStep

        return StageStep(config, world, precision, model)
    if kind == "pipeline":
        from train.parallel.pipeline import PipelineStep

        return PipelineStep(config, world, precision, model)
    if kind == "fsdp":
        from train.parallel.fsdp import ShardedStep

        return ShardedStep(config, world, precision, model)
    callee = model
    if config.compile:
        # one graph per batch size: after the smaller last batch of an epoch, torch's default would be one for any size
        callee = cast(nn.Module, torch.compile(model, dynamic=False))
    if kind == "dp":
        wrapped = dp.wrap(InContext(callee, precision, world.device), world, config)
    else:
        wrapped = ddp.wrap(callee, world, config)
    return Step(config, world, precision, model, wrapped)
