"""Gradient averaging over ranks: DistributedDataParallel, also on CPU over gloo."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.parallel.world import World
from train.syncbn import BATCH_NORMS


def wrap(model: nn.Module, world: World, config: Config) -> nn.Module:
    """`model` with gradients averaged over all ranks, which start from rank 0's weights; a single process gets `model`.

    Gradients are views of the communication buckets (gradient_as_bucket_view), which saves a copy of all gradients.
    """
    if world.size == 1:
        return model
    devices = [world.device.index] if world.device.type == "cuda" else None
    wrapped = DistributedDataParallel(
        model,
        device_ids=devices,
        gradient_as_bucket_view=True,
        broadcast_buffers=_needed_in_training(model),
        bucket_cap_mb=config.bucket_mb,
        static_graph=config.static_graph,
    )
    if config.gradient_compression == "bf16":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    return wrapped


def _needed_in_training(model: nn.Module) -> bool:
    """Whether a training step reads buffers, such as spectral norm's, so that all ranks need those of rank 0.

    Batch norm does not read its running statistics; `evaluate` sends out those of rank 0, which are saved too.
    """
    return any(list(module.buffers(recurse=False)) for module in model.modules() if not isinstance(module, BATCH_NORMS))
