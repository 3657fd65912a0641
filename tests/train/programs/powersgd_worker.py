"""Runs on each rank and prints JSON: compressed gradients of full rank against DDP's, and gradients that are zero."""

import copy
import json
import sys

import torch
from torch import nn

from train.__main__ import leave
from train.config import Config
from train.distributed.ddp import wrap
from train.distributed.powersgd import PowerSGD
from train.distributed.world import World, start
from train.models import SmallCNN


def full_rank(world: World) -> dict[str, float]:
    """Largest difference of gradients and weights in three float64 steps, relative to the largest of each tensor."""
    torch.manual_seed(0)
    model = SmallCNN(10).double()
    power = PowerSGD(10_000, seed=0, dtype=torch.float64, rate=0)
    config = Config(data="", image_size=8, bucket_mb=0.05)
    pair = [(module, wrap(module, world, config)) for module in (model, copy.deepcopy(model))]
    power.register(pair[1][1])
    worst = 0.0
    for number in range(5):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(world.rank + 9 * number)).double()
        for _, wrapped in pair:
            wrapped.zero_grad(set_to_none=False)
            wrapped(x).square().sum().backward()
        if number == 1:  # the buckets have been arranged
            power.begin()
        for one, other in zip(*(module.parameters() for module, _ in pair), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            worst = max(worst, float((one.grad - other.grad).abs().max() / one.grad.abs().max()))
            with torch.no_grad():
                one.sub_(0.01 * one.grad)
                other.sub_(0.01 * other.grad)
                worst = max(worst, float((one - other).abs().max()))
    return {
        "difference": worst,
        "compressed": sum(matrix.numel() for matrix in power.state.p_memory_dict.values()),
        "buckets": len(power.state.error_dict),
    }


def zeros(world: World) -> bool:
    """Whether gradients that are zero stay finite, at the ranks that torch orthogonalises in two ways."""
    for rank in (1, 2, 4):
        model = nn.Linear(32, 32)
        wrapped = wrap(model, world, Config(data=""))
        power = PowerSGD(rank, seed=0)
        power.register(wrapped)
        for _ in range(3):
            wrapped(torch.zeros(2, 32)).mul(0).sum().backward()
            power.begin()
        assert power.state.p_memory_dict[0].numel()
        if not all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters()):
            return False
    return True


if __name__ == "__main__":
    world = start(Config(data="", threads=1))
    sys.stdout.write(json.dumps({"full": full_rank(world), "finite": zeros(world)}) + "\n")
    leave(0)
