"""Hand-written model parallelism: one stage of the model per rank, activations sent forward and gradients back.

Only one batch is in flight. In the forward pass a rank waits only for its predecessor, in the backward pass only for
its successor, so there is no deadlock. If a rank dies, its neighbours get an error after --timeout at the latest.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.checkpoint import snapshot
from train.config import Config
from train.distributed.world import World
from train.errors import TrainError
from train.models import SmallCNN
from train.optim import load_state, set_rate
from train.precision import Precision
from train.step import Plan, Step

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
HEADER = 10  # dimensions, type, up to eight sizes


def _send(tensor: Tensor, to: int) -> None:
    header = [tensor.ndim, TYPES.index(tensor.dtype), *tensor.shape]
    dist.send(torch.tensor(header + [0] * (HEADER - len(header))), to)
    dist.send(tensor.contiguous(), to)


def _receive(source: int, device: torch.device) -> Tensor:
    """Receive a tensor, with its shape in a header because the last batch of an epoch is smaller."""
    header = torch.zeros(HEADER, dtype=torch.int64)
    dist.recv(header, source)
    dimensions, kind, *sizes = header.tolist()
    tensor = torch.empty(sizes[:dimensions], dtype=TYPES[kind], device=device)
    dist.recv(tensor, source)
    return tensor


class _Send(torch.autograd.Function):
    """Sends activations to the next rank; returns a token whose backward pass receives their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: int) -> Tensor:
        ctx.to, ctx.shape, ctx.dtype, ctx.device = to, x.shape, x.dtype, x.device
        _send(x.detach(), to)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del gradients  # of the token, unused
        gradient = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        dist.recv(gradient, ctx.to)
        return gradient, None


class _Receive(torch.autograd.Function):
    """Receives activations and sends their gradient back. `hook` only makes autograd call `backward`."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, source: int) -> Tensor:
        ctx.source = source
        return _receive(source, hook.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        dist.send(gradients[0].contiguous(), ctx.source)
        return gradients[0].new_zeros(()), None


class Stage(nn.Module):
    """This rank's layers and their communication; returns logits on the last rank, elsewhere a token for backward()."""

    def __init__(self, layers: nn.Module, world: World) -> None:
        super().__init__()
        self.layers = layers
        self._rank, self._last = world.rank, world.rank == world.size - 1
        self._hook = torch.zeros((), device=world.device, requires_grad=True)

    def forward(self, images: Tensor) -> Tensor:
        """`images` are used on the first rank only."""
        x: Tensor = _Receive.apply(self._hook, self._rank - 1) if self._rank else images
        x = self.layers(x)
        token: Tensor = x if self._last else _Send.apply(x, self._rank + 1)
        return token


def make_step(config: Config, world: World, precision: Precision, model: nn.Module) -> Step:
    """Return the step of this rank's stage."""
    return StageStep(config, world, precision, model)


class StageStep(Step):
    """A step of one stage. Every rank reads the same batch; the last rank has the logits and computes the counts."""

    def __init__(self, config: Config, world: World, precision: Precision, model: nn.Module) -> None:
        self.whole = model
        cut = stages(model, config.arch, world.size)
        for rank, part in enumerate(cut):
            part.to(world.device if rank == world.rank else "cpu")
        stage = Stage(cut[world.rank], world)
        super().__init__(config, world, precision, stage, stage)
        self.objective.has_logits = world.rank == world.size - 1
        self._optimizers: list[dict[str, Any] | None] = [None] * world.size

    def update(self, plan: Plan) -> bool:
        self._watch([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        set_rate(self.optimizer, plan.rate, plan.momentum)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return True

    def before_checkpoint(self) -> None:
        """Gather the weights of all stages in rank 0's complete model, and the states of their optimisers."""
        own = self.whole.state_dict(keep_vars=True)
        mine = {id(value) for value in self.model.state_dict(keep_vars=True).values()}
        part = {name: value.detach().cpu() for name, value in own.items() if id(value) in mine}
        parts: list[Any] | None = [None] * self.objective.world.size if self.objective.world.first else None
        # on the CPU: tensors unpickled from another process would be placed on the GPU with the same index
        dist.gather_object((part, snapshot(self.optimizer.state_dict())), parts)
        if parts:
            for weights, _ in parts:
                self.whole.load_state_dict(weights, strict=False)
            self._optimizers = [state for _, state in parts]

    def _model_state(self) -> dict[str, Any]:
        return self.whole.state_dict()

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the states of all stages gathered by `before_checkpoint`."""
        return {"stages": self._optimizers}

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Restore the state of this stage."""
        found, world = len(state.get("stages", [])), self.objective.world
        if found != world.size:
            raise TrainError(
                f"the checkpoint has {found or 'no'} stages, this run has {world.size}; use the same number of "
                f"processes and the same --parallel"
            )
        load_state(self.optimizer, state["stages"][world.rank])


# (architecture, ranks) -> the first layer of every stage except stage 0; the published split of experiment 4
PUBLISHED = {("cifar_mobilenet_v2", 4): (2, 8, 15), ("cifar_mobilenet_v2_nobn", 4): (2, 8, 15)}


class _Mean(nn.Module):
    """SmallCNN's pooling as a layer."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C)."""
        return x.mean((2, 3))


def layers(model: Any, arch: str) -> list[nn.Module]:
    """Return the model's layers (not copies) as a chain.

    Raises:
        TrainError: the model is not a known chain.
    """
    if isinstance(model, SmallCNN):
        return [*model.features, _Mean(), model.classifier]
    if isinstance(model, nn.Sequential):
        return list(model)
    kind = type(model).__module__
    if kind == "torchvision.models.resnet":
        stem = [model.conv1, model.bn1, model.relu, model.maxpool]
        blocks = [*model.layer1, *model.layer2, *model.layer3, *model.layer4]
        return [*stem, *blocks, model.avgpool, nn.Flatten(), model.fc]
    if kind == "torchvision.models.vgg":
        return [*model.features, model.avgpool, nn.Flatten(), *model.classifier]
    raise TrainError(
        f"--arch {arch}: cannot be split into stages; use resnet*, vgg*, smallcnn or a cifar_* model, or --parallel ddp"
    )


def stages(model: nn.Module, arch: str, ranks: int) -> list[nn.Sequential]:
    """Return one stage per rank: the published split if there is one, else equal numbers of layers.

    Raises:
        TrainError: the model is not a chain, or has fewer layers than ranks.
    """
    chain = layers(model, arch)
    if len(chain) < ranks:
        raise TrainError(
            f"--arch {arch}: cannot split {len(chain)} layers into {ranks} stages; use {len(chain)} processes or fewer"
        )
    inner = PUBLISHED.get((arch, ranks)) or [len(chain) * rank // ranks for rank in range(1, ranks)]
    bounds = [0, *inner, len(chain)]
    return [nn.Sequential(*chain[a:b]) for a, b in pairwise(bounds)]
