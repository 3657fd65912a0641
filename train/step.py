"""One training step: normalise and mix the images, compute the loss and gradients, update the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from train.config import Config
from train.data.batch import Batch
from train.distributed.world import World, broadcast_together
from train.ema import EMA
from train.errors import TrainError
from train.foreach import finite, first_not_finite
from train.loss import Loss, Mix, apply_mix, cross_entropy, losses, make_loss
from train.metrics import counts
from train.models import statistics
from train.optim import load_state, make_optimizer, set_rate
from train.precision import LossScale, Precision


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
        self.config, self.precision, self.world = config, precision, world
        self.loss = make_loss(config)  # of training
        self.has_logits = True  # False for all pipeline stages except the last

    def normalise(self, images: Tensor) -> Tensor:
        """Convert (n, H, W, 3) uint8 to (n, 3, H, W) in the weights' type: (x/255 - mean)/std.

        A permuted view of NHWC is channels_last NCHW, so the type conversion is the only copy.
        """
        x = torch.addcmul(self._shift, images.permute(0, 3, 1, 2).to(self._type), self._scale)
        return x.to(self.precision.weights).contiguous(memory_format=self.precision.layout)

    def forward_loss(
        self, model: nn.Module, batch: Batch, mix: Mix | None = None, loss: Loss = cross_entropy
    ) -> Output:
        """Compute the model's output and loss, for training and, with cross-entropy, for validation.

        A rank's loss is its sum over samples x ranks / total, so that DDP's mean over ranks is the mean over all
        samples of all ranks and micro-batches, even if the last batch of an epoch is split unevenly.
        """
        images = self.normalise(batch.images)
        if mix:
            images = apply_mix(mix, images)
        with self.precision.context(self.world.device):
            logits: Tensor = model(images)
        if not self.has_logits:
            return Output(logits, torch.zeros(4, dtype=torch.float64, device=self.world.device), None)
        logits = logits.to(self._type)  # 16 bits are too few for a softmax over a thousand classes
        each = losses(loss, logits, batch.labels, mix)
        share = (each * batch.weights).sum() * (self.world.data_shards / batch.total)
        return Output(share, counts(logits.detach(), batch.labels, each.detach(), batch.weights), logits)


@dataclass(frozen=True)
class Plan:
    """The inputs of a step besides data; `update`: the number of updates before it."""

    rate: float
    update: int
    mix: Mix | None = None
    momentum: float | None = None  # None: the optimiser's own


class Step:
    """Updates the model identically on every rank; gradients are reduced once, with the last micro-batch."""

    sharded = False  # every rank has only a shard of each weight
    forward_waits = True  # whether the forward pass may wait for other ranks
    keeps_gradients = False  # their memory is zeroed after an update, not freed
    to_rehearse = False  # whether `rehearse` must be called before the first step
    compiled = ""  # what --compile applies to, if not to the whole model

    def __init__(
        self,
        config: Config,
        world: World,
        precision: Precision,
        model: nn.Module,
        wrapped: nn.Module,
        parameters: list[nn.Parameter] | None = None,
    ) -> None:
        """`wrapped`: the module to call; `parameters`: what to update, if not the model's trainable parameters."""
        self.objective = Objective(config, precision, world)
        self.model, self.wrapped = model, wrapped
        self.parameters = parameters or [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = make_optimizer(config, model, self.parameters)
        self.scale = LossScale(precision.scaled)
        self.ema = self._averages(config.ema_decay) if config.ema_decay else None
        self.evaluated = self.ema.model if self.ema else model  # see `averaged`
        self.bad = torch.zeros(1, dtype=torch.float64, device=world.device)  # number of updates by inf or nan

    def _averages(self, decay: float) -> EMA:
        return EMA(self.model, decay, self.parameters)

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Yield the model to validate, which has the averaged weights if there are any."""
        yield self.evaluated

    def rehearse(self, batch: Batch) -> None:
        """Compute what must not differ between a process's first step and later ones; only DDP has something."""

    def sync(self, last: bool) -> None:
        """Prepare for a micro-batch: with the `last` one of a step, gradients are reduced over ranks if there are any.

        Called before its forward pass.
        """

    def forward(self, batch: Batch, plan: Plan) -> Output:
        """Compute a micro-batch's loss, and its `counts` on the device."""
        return self.objective.forward_loss(self.wrapped, batch, plan.mix, self.objective.loss)

    def backward(self, output: Output) -> None:
        """Add the micro-batch's gradients."""
        (output.loss * self.scale.value).backward()  # type: ignore[no-untyped-call]  # torch's stub

    def update(self, plan: Plan) -> bool:
        """Update the weights with the accumulated gradients; return False if they overflowed and it was skipped."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        applied = self.scale.unscale(self._local(gradients), self._everywhere)
        if applied:
            config = self.objective.config
            clip = config.clip_norm
            self._watch([torch.nn.utils.clip_grad_norm_(self.parameters, clip)] if clip else gradients)
            set_rate(self.optimizer, plan.rate, plan.momentum)
            self.optimizer.step()
            if self.ema and plan.update % config.ema_every == 0:
                self.ema.update(plan.update)
        self.wrapped.zero_grad(set_to_none=not self.keeps_gradients)
        return applied

    @torch.no_grad()
    def _watch(self, gradients: list[Tensor]) -> None:
        """Count an update if its gradients, or their norm, are not finite: on the device, so that nothing waits for it.

        With a loss scale, `LossScale.unscale` has found them finite.
        """
        if gradients and not (self.objective.config.allow_nan or self.scale.enabled):
            self.bad += finite(self._local(gradients)).logical_not()

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return this rank's part of each tensor."""
        return tensors

    def _everywhere(self, finite: Tensor) -> Tensor:
        """Return whether this rank's gradients and those of all others are `finite`, () bool; they are the same."""
        return finite

    def not_finite(self) -> str:
        """Name a trained weight, running statistic or value of the optimiser that has inf or nan on this rank, or "".

        Other buffers are not looked at: a mask may be -inf.
        """
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        named, kept = dict(zip(names, self.parameters, strict=True)), statistics(self.model)
        found: dict[str, Tensor] = {**named, **kept}
        if self.ema:
            found |= {f"the average of {name}": self.ema.averages[name] for name in (*named, *kept)}
        for name, parameter in named.items():
            state = self.optimizer.state.get(parameter, {})
            found |= {f"{key} of {name}": value for key, value in state.items() if isinstance(value, Tensor)}
        return first_not_finite(zip(found, self._local([value.detach() for value in found.values()]), strict=True))

    def gradient_seconds(self) -> float | None:
        """Return by how much the sum of gradients over ranks made a step longer; None if that is not known."""
        return None

    @property
    def bytes_besides(self) -> int:
        """Return the size of what a checkpoint has besides weights, optimiser, average and fp32 copies."""
        return 0

    def unused(self, state: Mapping[str, Any]) -> str:
        """Return what a checkpoint has that a run of these options cannot go on with, or ""."""
        if "compression" in state:
            return "its run compressed the gradients, and what was still to be sent is dropped"
        return ""

    @property
    def masters(self) -> list[Tensor] | None:
        """The fp32 copies of 16-bit weights, which --amp O2 has."""
        return None

    def before_checkpoint(self) -> None:
        """Collective of all ranks that sends missing state to the ranks that write a checkpoint.

        With --replicate, these are rank 0's running statistics: those of other ranks are unused, but would be saved.
        """
        if self.objective.config.replicated and self.objective.world.size > 1:
            self._send_statistics()

    def _send_statistics(self) -> None:
        """Give all ranks the buffers of rank 0, and their averages."""
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
            "masters": self.masters,
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
        same_parts(("--ema-decay", self.ema, state["ema"]), ("--amp O2", self.masters, state["masters"]))
        if self.ema:
            self.ema.load(state["ema"])
        for ours, theirs in zip(self.masters or (), state["masters"] or (), strict=True):
            ours.copy_(theirs)

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        if "stages" in state:
            raise TrainError(f"the checkpoint has {len(state['stages'])} stages; use the same --parallel")
        load_state(self.optimizer, state)


def same_parts(*parts: tuple[str, Any, Any]) -> None:
    """Raise TrainError if a step has what its checkpoint lacks, or the other way round: an option, and both or None."""
    for option, own, saved in parts:
        if (own is None) != (saved is None):
            how = "without" if saved is None else "with"
            raise TrainError(f"the checkpoint was saved {how} {option}; use the same options")
