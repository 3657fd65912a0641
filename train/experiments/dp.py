"""DataParallel: one process with threads and one replica per device. On CPU, the same algorithm for comparison.

The batch is split by `chunk` (5 over 3 devices is 2, 2, 1), each replica computes its piece on its own thread, the
logits are concatenated, and the replicas' gradients are summed in the weights. Batch norm uses only the replica's
piece; the running statistics of the first replica are kept.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.func import functional_call

from train.config import Config
from train.distributed.ddp import step_type
from train.distributed.world import World
from train.errors import TrainError
from train.precision import InContext, Precision
from train.step import Step


def make_step(config: Config, world: World, precision: Precision, model: nn.Module) -> Step:
    """Return the step of one process that uses all devices."""
    callee = InContext(model, precision, world.device)
    return step_type(precision, several=False)(config, world, precision, model, wrap(callee, world, config))


class Replicas(nn.Module):
    """`count` replicas of `module` on the CPU, equivalent to nn.DataParallel, which works on GPUs only."""

    def __init__(self, module: nn.Module, count: int) -> None:
        super().__init__()
        self.module = module
        # in a tuple, so that they are not submodules; their weights are never used, see `_state`
        self._copies = tuple(copy.deepcopy(module) for _ in range(count - 1))
        self._pool = ThreadPoolExecutor(count, "replica")

    def forward(self, images: Tensor) -> Tensor:
        """(n, ...) -> (n, classes)."""
        pieces = images.chunk(1 + len(self._copies))
        graph = torch.is_grad_enabled()
        states = [self._state() for _ in pieces[1:]]

        def run(replica: int, piece: Tensor) -> Tensor:
            with torch.set_grad_enabled(graph):  # a per-thread setting
                out: Tensor
                if replica == 0:
                    out = self.module(piece)
                else:
                    copied = self._copies[replica - 1]
                    for ours, theirs in zip(copied.modules(), self.module.modules(), strict=True):
                        ours.training = theirs.training  # frozen batch norm is not in training mode
                    out = functional_call(copied, states[replica - 1], (piece,))
                return out

        return torch.cat(list(self._pool.map(run, range(len(pieces)), pieces)))

    def _state(self) -> dict[str, Tensor]:
        """Return views of the weights, for the backward pass, and copies of the running statistics."""
        views = {name: parameter.view_as(parameter) for name, parameter in self.module.named_parameters()}
        return {**views, **{name: buffer.clone() for name, buffer in self.module.named_buffers()}}


def devices(config: Config, world: World) -> int:
    """Return the number of replicas.

    Raises:
        TrainError: more replicas than GPUs.
    """
    found = torch.cuda.device_count()
    if world.device.type == "cpu":
        return config.replicas or 2
    if config.replicas > found:
        raise TrainError(f"--replicas {config.replicas}: there are {found} GPUs")
    return config.replicas or found


def wrap(model: nn.Module, world: World, config: Config) -> nn.Module:
    """Wrap `model` in replicas; the state stays in `model`."""
    count = devices(config, world)
    if world.device.type == "cpu":
        return Replicas(model, count)
    return nn.DataParallel(model, list(range(count)))
