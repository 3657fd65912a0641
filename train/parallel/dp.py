"""DataParallel: one process, a replica a device, threads. On CPU the same algorithm, so that it can be compared there.

The batch is cut by `chunk` (5 over 3 devices is 2, 2, 1), each replica computes its piece on a thread of its own, the
logits are joined, and the replicas' gradients add up in the weights. Batch norm sees a replica's piece; the first
replica's running statistics are kept.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from train.config import Config
from train.errors import TrainError
from train.parallel.world import World


class Replicas(nn.Module):
    """`module` on the CPU `count` times over, as nn.DataParallel does it on GPUs (where alone that one works)."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module = module
        skeletons = [copy.deepcopy(module) for _ in range(count - 1)]
        for skeleton in skeletons:
            for part in skeleton.modules():
                part._parameters = dict.fromkeys(part._parameters)  # as torch's replicate
        self._skeletons = tuple(skeletons)  # a tuple: no submodules of ours
        self._pool = ThreadPoolExecutor(count, "replica")

    def forward(self, images: Tensor) -> Tensor:
        """(n, ...) -> (n, classes)."""
        pieces = images.chunk(1 + len(self._skeletons))
        replicas = [self.module, *map(self._refresh, self._skeletons)][: len(pieces)]
        graph = torch.is_grad_enabled()

        def run(replica: nn.Module, piece: Tensor) -> Tensor:
            with torch.set_grad_enabled(graph):  # a thread's own setting
                out: Tensor = replica(piece)
                return out

        return torch.cat(list(self._pool.map(run, replicas, pieces)))

    def _refresh(self, skeleton: nn.Module) -> nn.Module:
        """The skeleton with today's weights, through which gradients flow back, and a copy of the statistics."""
        for ours, theirs in zip(self.module.modules(), skeleton.modules(), strict=True):
            for name, parameter in ours._parameters.items():
                if parameter is not None:
                    theirs._parameters.pop(name, None)
                    theirs.__dict__[name] = parameter.view_as(parameter)
            for name, buffer in ours._buffers.items():
                theirs._buffers[name] = None if buffer is None else buffer.clone()
            theirs.training = ours.training
        return skeleton


def devices(config: Config, world: World) -> int:
    """How many replicas.

    Raises:
        TrainError: more than one process, or more replicas than GPUs.
    """
    if world.size > 1:
        raise TrainError(
            f"--parallel dp is one process with all devices, not {world.size}; set processes to 1, or use ddp"
        )
    found = torch.cuda.device_count()
    if world.device.type == "cpu":
        return config.replicas or 2
    if config.replicas > found:
        raise TrainError(f"--replicas {config.replicas}: there are {found} GPUs")
    return config.replicas or found


def wrap(model: nn.Module, world: World, config: Config) -> nn.Module:
    """`model` replicated; its state stays in `model`."""
    count = devices(config, world)
    if world.device.type == "cpu":
        return Replicas(model, count)
    return nn.DataParallel(model, list(range(count)))
