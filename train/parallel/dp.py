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
from torch.func import functional_call

from train.config import Config
from train.errors import TrainError
from train.parallel.world import World


class Replicas(nn.Module):
    """`module` on the CPU `count` times over, as nn.DataParallel does it on GPUs (where alone that one works)."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module = module
        # in a tuple, so that they are no submodules; their own weights are never used, see `_state`
        self._copies = tuple(copy.deepcopy(module) for _ in range(count - 1))
        self._pool = ThreadPoolExecutor(count, "replica")

    def forward(self, images: Tensor) -> Tensor:
        """(n, ...) -> (n, classes)."""
        pieces = images.chunk(1 + len(self._copies))
        graph = torch.is_grad_enabled()
        states = [self._state() for _ in pieces[1:]]

        def run(replica: int, piece: Tensor) -> Tensor:
            with torch.set_grad_enabled(graph):  # a setting of each thread
                out: Tensor
                if replica == 0:
                    out = self.module(piece)
                else:
                    copied = self._copies[replica - 1].train(self.module.training)
                    out = functional_call(copied, states[replica - 1], (piece,))
                return out

        return torch.cat(list(self._pool.map(run, range(len(pieces)), pieces)))

    def _state(self) -> dict[str, Tensor]:
        """Views of the weights, through which gradients flow back, and copies of the running statistics."""
        views = {name: parameter.view_as(parameter) for name, parameter in self.module.named_parameters()}
        return {**views, **{name: buffer.clone() for name, buffer in self.module.named_buffers()}}


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
