"""Model parallelism by hand: a stage of the model on each rank, activations sent forward and gradients back.

One batch is under way at a time. Forward a rank waits for the one before alone, backward for the one after alone, so
nothing can wait in a circle; a rank that died ends its neighbours' wait with an error, at the latest after --timeout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.config import Config
from train.data.loader import Batch
from train.errors import TrainError
from train.metrics import counts
from train.objective import apply_mix, losses
from train.optim import set_rate
from train.parallel.cut import stages
from train.parallel.world import World
from train.precision import Precision
from train.step import Plan, Step

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
HEADER = 10  # dimensions, type, up to eight sizes


def _send(tensor: Tensor, to: int) -> None:
    header = [tensor.ndim, TYPES.index(tensor.dtype), *tensor.shape]
    dist.send(torch.tensor(header + [0] * (HEADER - len(header))), to)
    dist.send(tensor.contiguous(), to)


def _receive(source: int, device: torch.device) -> Tensor:
    """A tensor of any shape: the header of every batch tells, since the last one is smaller."""
    header = torch.zeros(HEADER, dtype=torch.int64)
    dist.recv(header, source)
    dimensions, kind, *sizes = header.tolist()
    tensor = torch.empty(sizes[:dimensions], dtype=TYPES[kind], device=device)
    dist.recv(tensor, source)
    return tensor


class _Send(torch.autograd.Function):
    """Sends activations on; its result is a token whose backward pass receives their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to: int) -> Tensor:
        ctx.to, ctx.shape, ctx.dtype, ctx.device = to, x.shape, x.dtype, x.device
        _send(x.detach(), to)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del gradients  # of the token: it carries no value
        gradient = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        dist.recv(gradient, ctx.to)
        return gradient, None


class _Receive(torch.autograd.Function):
    """Receives activations; sends their gradient back. `hook` only makes autograd come by here."""

    @staticmethod
    def forward(ctx: Any, hook: Tensor, source: int) -> Tensor:
        ctx.source = source
        return _receive(source, hook.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        dist.send(gradients[0].contiguous(), ctx.source)
        return gradients[0].new_zeros(()), None


class Stage(nn.Module):
    """This rank's layers between its neighbours: logits on the last rank, elsewhere a token to call backward on."""

    def __init__(self, layers: nn.Module, world: World) -> None:
        super().__init__()
        self.layers = layers
        self._rank, self._last = world.rank, world.rank == world.size - 1
        self._hook = torch.zeros((), device=world.device, requires_grad=True)

    def forward(self, images: Tensor) -> Tensor:
        """`images` count on the first rank alone."""
        x: Tensor = _Receive.apply(self._hook, self._rank - 1) if self._rank else images
        x = self.layers(x)
        token: Tensor = x if self._last else _Send.apply(x, self._rank + 1)
        return token


class StageStep(Step):
    """A step of one stage. Every rank reads the same batch; the last one has the logits and counts."""

    def __init__(self, config: Config, world: World, precision: Precision, model: nn.Module) -> None:
        _check(config)
        self.whole = model
        cut = stages(model, config.arch, world.size)
        for rank, part in enumerate(cut):
            part.to(world.device if rank == world.rank else "cpu")
        stage = Stage(cut[world.rank], world)
        super().__init__(config, world, precision, stage, stage)
        self.has_logits = world.rank == world.size - 1
        self._optimizers: list[dict[str, Any] | None] = [None] * world.size

    def accumulate(self, batch: Batch, plan: Plan) -> Tensor:
        """Adds a micro-batch's gradients; its `counts` on the last rank, zeros elsewhere."""
        device = self.world.device
        images = self.normalise(batch.images.to(device, non_blocking=True))
        labels, weights = batch.labels.to(device, non_blocking=True), batch.weights.to(device, non_blocking=True)
        if plan.mix:
            images = apply_mix(plan.mix, images)
        with self.precision.context(device):
            logits = self.wrapped(images)
        if not self.has_logits:
            logits.backward()
            return torch.zeros(4, dtype=torch.float64, device=device)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = losses(logits, labels, self.config.label_smoothing, plan.mix)
        ((loss * weights).sum() * (1 / batch.total)).backward()  # type: ignore[no-untyped-call]  # torch's stub
        return counts(logits.detach(), labels, loss.detach(), weights)

    def update(self, plan: Plan) -> bool:
        """Moves this stage's weights."""
        set_rate(self.optimizer, plan.rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return True

    def gather_to_rank0(self) -> None:
        """Brings all stages' weights into rank 0's whole model, and their optimisers' states beside it."""
        own = self.whole.state_dict(keep_vars=True)
        mine = {id(value) for value in self.model.state_dict(keep_vars=True).values()}
        part = {name: value.detach().cpu() for name, value in own.items() if id(value) in mine}
        parts: list[Any] | None = [None] * self.world.size if self.world.first else None
        dist.gather_object((part, self.optimizer.state_dict()), parts)
        if parts:
            for weights, _ in parts:
                self.whole.load_state_dict(weights, strict=False)
            self._optimizers = [state for _, state in parts]

    def optimizer_state(self) -> dict[str, Any]:
        """All stages', as `gather_to_rank0` left them."""
        return {"stages": self._optimizers}

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """This stage's part.

        Raises:
            TrainError: the checkpoint is of another cut.
        """
        found = len(state.get("stages", []))
        if found != self.world.size:
            raise TrainError(
                f"the checkpoint was made with {found or 'no'} stages, this run has {self.world.size}; use as many"
            )
        self.optimizer.load_state_dict(state["stages"][self.world.rank])


def _check(config: Config) -> None:
    """What a stage cannot do on its own is refused instead of being done wrongly."""
    refused = {
        "--amp": config.amp in ("fp16", "O1", "O2", "O3"),  # an overflow in one stage would have to be known in all
        "--clip-norm": config.clip_norm > 0,
        "--ema-decay": config.ema_decay > 0,
        "--syncbn": config.syncbn != "none",
        "--compile": config.compile,
    }
    if found := [f"{name} {getattr(config, name[2:].replace('-', '_'))}" for name, wrong in refused.items() if wrong]:
        raise TrainError(f"--parallel {config.parallel} does not do {', '.join(found)}; leave it out, or use ddp")
