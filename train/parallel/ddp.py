"""Gradient averaging over ranks: DistributedDataParallel, also on CPU over gloo."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.parallel.world import World


def wrap(model: nn.Module, world: World, config: Config) -> nn.Module:
    """`model` with gradients averaged over all ranks, which start from rank 0's weights; a single process gets `model`.

    Gradients are views of the communication buckets (gradient_as_bucket_view), which saves a copy of all gradients.
    """
    if world.size == 1:
        return model
    devices = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(
        model,
        device_ids=devices,
        gradient_as_bucket_view=True,
        bucket_cap_mb=config.bucket_mb,
        static_graph=config.static_graph,
    )
