"""Gradient averaging over ranks: DistributedDataParallel, also on CPU over gloo."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.parallel.world import World
from train.syncbn import BATCH_NORMS


def wrap(model: nn.Module, world: World, config: Config) -> nn.Module:
    """`model` with gradients averaged over all ranks, if there are several."""
    return model if world.size == 1 else distributed(model, world, config)


def distributed(model: nn.Module, world: World, config: Config) -> DistributedDataParallel:
    """DDP with the run's options; all ranks start from rank 0's weights.

    Gradients are views of the communication buckets (gradient_as_bucket_view), which saves a copy of all gradients.
    """
    devices = [world.device.index] if world.device.type == "cuda" else None
    # torch 2.14 renamed it and warns of the old name
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
    """Whether a training step reads buffers, such as spectral norm's, so that all ranks need those of rank 0.

    Batch norm does not read its running statistics; `evaluate` sends out those of rank 0, which are saved too.
    """
    return any(list(module.buffers(recurse=False)) for module in model.modules() if not isinstance(module, BATCH_NORMS))
