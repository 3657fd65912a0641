"""DistributedDataParallel: gradients are averaged over ranks, on CPU over gloo."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.distributed.methods import Abilities
from train.distributed.world import World
from train.models import BATCH_NORMS, BlurredConv, has_own_sync_batch_norm
from train.precision import Precision
from train.step import Step


def problems(config: Config, processes: int) -> Iterator[str]:
    """Yield reasons to reject these options with this number of processes."""
    if config.parallel == "single" and processes > 1:
        yield f"--parallel single runs one process, not {processes}; use ddp, or set processes to 1"


ABILITIES = Abilities(problems=problems)


def make_step(config: Config, world: World, precision: Precision, model: nn.Module) -> Step:
    """Return the step of a single process, or of several that average their gradients."""
    step = step_type(precision)(config, world, precision, model, wrap(compiled(model, config), world, config))
    library = any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())
    step.forward_waits = library or has_own_sync_batch_norm(model) or _needed_in_training(model)
    return step


def step_type(precision: Precision) -> type[Step]:
    """Return the class of a step in which every rank has the whole model."""
    if precision.masters:
        from train.experiments.masters import MastersStep

        return MastersStep
    return Step


def compiled(model: nn.Module, config: Config) -> nn.Module:
    """Compile the model if --compile is set, with a graph per batch size.

    torch's default would create a dynamic graph after the smaller last batch of an epoch.
    """
    if not config.compile:
        return model
    return cast(nn.Module, torch.compile(model, dynamic=False, mode=config.compile_mode))


def wrap(model: nn.Module, world: World, config: Config) -> nn.Module:
    """Wrap `model` in DDP if there are several ranks."""
    return model if world.size == 1 else distributed(model, world, config)


def distributed(model: nn.Module, world: World, config: Config) -> DistributedDataParallel:
    """Wrap `model` in DDP with the run's options; all ranks start from rank 0's weights.

    Gradients are views of the communication buckets (gradient_as_bucket_view), which saves a copy of all gradients.
    """
    devices = [world.device.index] if world.device.type == "cuda" else None
    # torch 2.14 renamed the argument and warns about the old name
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    buffers: dict[str, Any] = {name: _needed_in_training(model)}
    wrapped = DistributedDataParallel(
        model,
        device_ids=devices,
        gradient_as_bucket_view=True,
        bucket_cap_mb=config.bucket_mb,
        static_graph=config.static_graph,
        **buffers,
    )
    if config.gradient_compression == "bf16":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def _needed_in_training(model: nn.Module) -> bool:
    """Whether a training step reads buffers, such as spectral norm's, so that all ranks need rank 0's buffers.

    Batch norm does not read its running statistics; `evaluate` broadcasts those of rank 0, which are also saved. The
    filters of BlurPool never change.
    """
    same = (*BATCH_NORMS, BlurredConv)
    return any(list(module.buffers(recurse=False)) for module in model.modules() if not isinstance(module, same))
