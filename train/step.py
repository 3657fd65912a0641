"""One training step: normalise and mix the images, compute the loss and gradients, update the weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn

from train.config import Config
from train.data.batch import Batch
from train.distributed.world import World, broadcast_together
from train.errors import TrainError
from train.foreach import copy_
from train.metrics import counts
from train.optim import load_state, make_optimizer, set_rate
from train.precision import LossScale, Masters, Precision


@dataclass(frozen=True)
class Mix:
    """Mix of two images: `share` of the image and the rest of its neighbour, blended or as a patch (`box`)."""

    share: float
    box: tuple[int, int, int, int] | None  # top, bottom, left, right


def draw_mix(config: Config, seed: int, side: int) -> Mix | None:
    """Draw the mix of one step from the step's seed: mixup or cutmix, or one of them at random if both are enabled.

    Zhang et al., arXiv 1710.09412; Yun et al., arXiv 1905.04899.
    """
    kinds = [kind for kind, alpha in (("mixup", config.mixup), ("cutmix", config.cutmix)) if alpha > 0]
    if not kinds:
        return None
    draw = np.random.Generator(np.random.Philox(seed))
    kind = kinds[int(draw.integers(len(kinds)))]
    if kind == "mixup":
        return Mix(float(draw.beta(config.mixup, config.mixup)), None)
    share = float(draw.beta(config.cutmix, config.cutmix))
    half = side * math.sqrt(1 - share) / 2
    y, x = draw.integers(side, size=2)
    top, bottom, left, right = (round(min(max(v, 0), side)) for v in (y - half, y + half, x - half, x + half))
    return Mix(1 - (bottom - top) * (right - left) / side**2, (top, bottom, left, right))


def apply_mix(mix: Mix, images: Tensor) -> Tensor:
    """Mix image i with image i - 1; (n, 3, H, W)."""
    other = images.roll(1, 0)
    if mix.box is None:
        return torch.lerp(other, images, mix.share)
    top, bottom, left, right = mix.box
    mixed = images.clone(memory_format=torch.preserve_format)
    mixed[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    return mixed


def losses(logits: Tensor, labels: Tensor, kind: str = "ce", smoothing: float = 0.0, mix: Mix | None = None) -> Tensor:
    """Return the (n,) losses of --loss `kind`; for mixed images the mean over both labels, weighted by share.

    bce: Wightman et al., arXiv 2110.00476, section 3.2.
    """

    def against(labels: Tensor) -> Tensor:
        if kind == "ce":
            return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        target = functional.one_hot(labels, logits.shape[1]) * (1 - smoothing) + smoothing / logits.shape[1]
        each = functional.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")
        return each.sum(1)

    loss = against(labels)
    return loss if mix is None else torch.lerp(against(labels.roll(1, 0)), loss, mix.share)


class Output(NamedTuple):
    """Result of `forward_loss` for a micro-batch. A model stage without logits has a token for `loss.backward()`."""

    loss: Tensor  # scalar: this rank's share of the step's loss
    counts: Tensor  # see `metrics.counts`
    logits: Tensor | None  # (n, classes), in at least fp32


class Objective:
    """The training objective: from uint8 images and labels on the device to the loss, in the run's precision."""

    def __init__(self, config: Config, precision: Precision, world: World) -> None:
        mean = torch.tensor(config.mean, dtype=torch.float64) * 255
        std = torch.tensor(config.std, dtype=torch.float64) * 255
        # computed in at least fp32 and rounded to the weights' type at the end
        self._type = torch.promote_types(precision.weights, torch.float32)
        self._scale = (1 / std).view(1, 3, 1, 1).to(world.device, self._type)
        self._shift = (-mean / std).view(1, 3, 1, 1).to(world.device, self._type)
        self._precision, self._world = precision, world
        self.config = config
        self.has_logits = True  # False for all pipeline stages except the last

    def normalise(self, images: Tensor) -> Tensor:
        """Convert (n, H, W, 3) uint8 to (n, 3, H, W) in the weights' type: (x/255 - mean)/std.

        A permuted view of NHWC is channels_last NCHW, so the type conversion is the only copy.
        """
        x = torch.addcmul(self._shift, images.permute(0, 3, 1, 2).to(self._type), self._scale)
        return x.to(self._precision.weights).contiguous(memory_format=self._precision.layout)

    def forward_loss(
        self, model: nn.Module, batch: Batch, mix: Mix | None = None, kind: str = "ce", smoothing: float = 0.0
    ) -> Output:
        """Compute the model's output and loss, for training and validation.

        A rank's loss is its sum over samples x ranks / total, so that DDP's mean over ranks is the mean over all
        samples of all ranks and micro-batches, even if the last batch of an epoch is split unevenly.
        """
        images = self.normalise(batch.images)
        if mix:
            images = apply_mix(mix, images)
        with self._precision.context(self._world.device):
            logits: Tensor = model(images)
        if not self.has_logits:
            return Output(logits, torch.zeros(4, dtype=torch.float64, device=self._world.device), None)
        logits = logits.to(self._type)  # 16 bits are too few for a softmax over a thousand classes
        each = losses(logits, batch.labels, kind, smoothing, mix)
        loss = (each * batch.weights).sum() * (self._world.data_shards / batch.total)
        return Output(loss, counts(logits.detach(), batch.labels, each.detach(), batch.weights), logits)


@dataclass(frozen=True)
class Plan:
    """The inputs of a step besides data; `update`: the number of updates before it."""

    rate: float
    update: int
    mix: Mix | None = None
    momentum: float | None = None  # None: the optimiser's own


def _nothing() -> None:
    """Default for `Step.computed`."""


class Step:
    """Updates the model identically on every rank; gradients are reduced once, with the last micro-batch."""

    sharded = False  # every rank has only a shard of each weight
    forward_waits = True  # whether the forward pass may wait for other ranks

    def __init__(
        self, config: Config, world: World, precision: Precision, model: nn.Module, wrapped: nn.Module
    ) -> None:
        self.config, self.world, self.precision = config, world, precision
        self.model, self.wrapped = model, wrapped
        self.masters = Masters(model) if precision.masters else None
        own = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parameters = self.masters.parameters if self.masters else own
        self.optimizer = make_optimizer(config, model, self.parameters)
        self.scale = LossScale(precision.scaled)
        self.ema = EMA(model, config.ema_decay, self.parameters) if config.ema_decay else None
        self.objective = Objective(config, precision, world)
        self.computed: Callable[[], None] = _nothing  # called after each forward pass

    def accumulate(self, batch: Batch, plan: Plan) -> Tensor:
        """Add a micro-batch's gradients; return its `counts` on the device."""
        local = isinstance(self.wrapped, DistributedDataParallel) and not batch.last
        if self.masters and batch.last:
            self.masters.add_back()
        with self.wrapped.no_sync() if local else nullcontext():  # type: ignore[operator]  # DDP, so it has one
            config = self.config
            output = self.objective.forward_loss(self.wrapped, batch, plan.mix, config.loss, config.label_smoothing)
            self.computed()
            (output.loss * self.scale.value).backward()  # type: ignore[no-untyped-call]  # torch's stub
        if self.masters and not batch.last:
            self.masters.set_aside()
        return output.counts

    def update(self, plan: Plan) -> bool:
        """Update the weights with the accumulated gradients; return False if they overflowed and it was skipped."""
        if self.masters:
            self.masters.take_gradients()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        applied = self.scale.unscale(gradients)
        if applied:
            if self.config.clip_norm:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
            set_rate(self.optimizer, plan.rate, plan.momentum)
            self.optimizer.step()
            if self.masters:
                self.masters.publish()
            if self.ema and plan.update % self.config.ema_every == 0:
                self.ema.update(plan.update)
        self.wrapped.zero_grad(set_to_none=not isinstance(self.wrapped, DistributedDataParallel))
        return applied

    @property
    def evaluated(self) -> nn.Module:
        """The model to validate: the averaged weights if there are any."""
        return self.ema.model if self.ema else self.model

    def before_checkpoint(self) -> None:
        """Collective of all ranks that sends missing state to the ranks that write a checkpoint.

        With --replicate, these are rank 0's running statistics: those of other ranks are unused, but would be saved.
        """
        if self.config.replicated and self.world.size > 1:
            averages = self.ema.averages if self.ema else {}
            found = [(buffer, averages.get(name)) for name, buffer in self.model.named_buffers()]
            broadcast_together([value for pair in found for value in pair if value is not None])

    def state(self) -> dict[str, Any]:
        """Return the state of model and training for a checkpoint; call after `before_checkpoint`."""
        return {
            "model": self._model_state(),
            "optimizer": self._optimizer_state(),
            "scale": self.scale.state_dict(),
            "ema": self.ema.averages if self.ema else None,
            "masters": [p.detach() for p in self.masters.parameters] if self.masters else None,
        }

    def _model_state(self) -> dict[str, Any]:
        return self.model.state_dict()

    def _optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`, except the optimiser's settings; the weights are already loaded.

        Raises:
            TrainError: the state is of another kind of step, or was saved with other options.
        """
        self._load_optimizer(state["optimizer"])
        self.scale.load_state_dict(state["scale"])
        parts = ("--ema-decay", self.ema, state["ema"]), ("--amp O2", self.masters, state["masters"])
        for option, own, saved in parts:
            if (own is None) != (saved is None):
                how = "without" if saved is None else "with"
                raise TrainError(f"the checkpoint was saved {how} {option}; use the same options")
        if self.ema:
            self.ema.load(state["ema"])
        if self.masters:
            for ours, theirs in zip(self.masters.parameters, state["masters"], strict=True):
                ours.data.copy_(theirs)

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        if "stages" in state:
            raise TrainError(f"the checkpoint has {len(state['stages'])} stages; use the same --parallel")
        load_state(self.optimizer, state)


class EMA:
    """Exponential moving average of the weights, often more accurate than the weights late in training.

    average <- d*average + (1 - d)*weights after every update, d = min(decay, (1 + t)/(10 + t)) at update t. The warm-up
    of d is TensorFlow's (ExponentialMovingAverage, num_updates). Running statistics are averaged the same way; integers
    are copied. Averages are in at least fp32, because small changes would be lost in 16 bits.
    """

    def __init__(self, model: nn.Module, decay: float, weights: Sequence[Tensor]) -> None:
        """`weights`: the tensors that the optimiser updates: trainable parameters or their fp32 masters, in order."""
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        # 16-bit weights of the model are rounded copies of their averages; all others are the averages
        self._own: dict[str, Tensor] = self.model.state_dict()
        self.averages = {
            name: value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
            for name, value in self._own.items()
        }
        # listed once: the weights and statistics are changed in place for the whole run
        now = model.state_dict() | dict(zip(trained, weights, strict=True))
        floats = [name for name, value in self.averages.items() if value.is_floating_point()]
        integers = [name for name in self.averages if name not in floats]
        self._floats = [self.averages[name] for name in floats], [now[name].detach() for name in floats]
        self._integers = [self.averages[name] for name in integers], [now[name] for name in integers]
        rounded = [name for name, value in self._own.items() if value is not self.averages[name]]
        self._rounded = [self._own[name] for name in rounded], [self.averages[name] for name in rounded]

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Update the averages after update number `updates` (counted from 0)."""
        decay = min(self._decay, (1 + updates) / (10 + updates))
        average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # torch's own
        averages, now = self._floats
        average(averages, [new.to(old.dtype) for old, new in zip(averages, now, strict=True)], updates)
        copy_(*self._integers)
        copy_(*self._rounded)

    @torch.no_grad()
    def load(self, averages: Mapping[str, Tensor]) -> None:
        """Load some or all averages, and copy all averages to the model's weights."""
        for name, value in averages.items():
            self.averages[name].copy_(value)
        copy_(*self._rounded)
