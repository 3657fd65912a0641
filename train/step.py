"""One training step: forward and backward of micro-batches, normalised on the device, then the weight update."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.config import Config
from train.data.batch import Batch
from train.ema import EMA
from train.errors import TrainError
from train.metrics import counts
from train.objective import Mix, apply_mix, losses, wide
from train.optim import load_state, make_optimizer, set_rate
from train.parallel.world import World
from train.precision import LossScale, Masters, Precision


class Forward:
    """From (n, H, W, 3) uint8 images on the device to logits: normalised, mixed, in the run's precision."""

    def __init__(self, config: Config, precision: Precision, device: torch.device) -> None:
        mean = torch.tensor(config.mean, dtype=torch.float64) * 255
        std = torch.tensor(config.std, dtype=torch.float64) * 255
        # computed in at least fp32 and rounded to the weights' type at the end
        self._type = torch.promote_types(precision.weights, torch.float32)
        self._scale = (1 / std).view(1, 3, 1, 1).to(device, self._type)
        self._shift = (-mean / std).view(1, 3, 1, 1).to(device, self._type)
        self._precision, self._device = precision, device

    def normalise(self, images: Tensor) -> Tensor:
        """(n, 3, H, W) in the weights' type, (x/255 - mean)/std.

        A permuted view of NHWC is channels_last NCHW, so the type conversion is the only copy.
        """
        x = torch.addcmul(self._shift, images.permute(0, 3, 1, 2).to(self._type), self._scale)
        return x.to(self._precision.weights).contiguous(memory_format=self._precision.layout)

    def __call__(self, model: nn.Module, images: Tensor, mix: Mix | None = None) -> Tensor:
        """The model's logits, in at least fp32."""
        images = self.normalise(images)
        if mix:
            images = apply_mix(mix, images)
        with self._precision.context(self._device):
            logits: Tensor = model(images)
        return wide(logits)


@dataclass(frozen=True)
class Plan:
    """The inputs of a step besides data: learning rate, number of the update, mix."""

    rate: float
    update: int
    mix: Mix | None = None


class Step:
    """Updates the model, identically on every rank.

    A rank's loss is its sum over samples x ranks / total: DDP's mean over ranks is then the mean over all samples of
    all ranks and micro-batches, even if the last batch of an epoch is divided unevenly. Gradients are reduced once per
    update, with the last micro-batch.
    """

    def __init__(
        self, config: Config, world: World, precision: Precision, model: nn.Module, wrapped: nn.Module
    ) -> None:
        self.config, self.world, self.precision = config, world, precision
        self.model, self.wrapped = model, wrapped
        self.masters = Masters(model) if precision.masters else None
        own = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parameters = self.masters.parameters if self.masters else own
        self.optimizer = make_optimizer(config, self.parameters)
        self.scale = LossScale(precision.scaled)
        self.ema = EMA(model, config.ema_decay, self.parameters) if config.ema_decay else None
        self.forward = Forward(config, precision, world.device)
        self.has_logits = True  # and can count hits; with model stages only the last one has logits

    def accumulate(self, batch: Batch, plan: Plan) -> Tensor:
        """Adds a micro-batch's gradients; returns its `counts` on the device."""
        local = isinstance(self.wrapped, DistributedDataParallel) and not batch.last
        with self.wrapped.no_sync() if local else nullcontext():  # type: ignore[operator]  # DDP, so it has one
            logits = self.forward(self.wrapped, batch.images, plan.mix)
            if not self.has_logits:
                logits.backward()  # type: ignore[no-untyped-call]  # torch's stub
                return self._no_counts()
            loss = losses(logits, batch.labels, self.config.label_smoothing, plan.mix)
            total = (loss * batch.weights).sum() * (self.world.data_shards / batch.total)
            (total * self.scale.value).backward()  # type: ignore[no-untyped-call]  # torch's stub
        return counts(logits.detach(), batch.labels, loss.detach(), batch.weights)

    @torch.inference_mode()
    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """A validation batch's `counts`, and which images are misclassified."""
        logits = self.forward(self.evaluated, batch.images)
        if not self.has_logits:
            return self._no_counts(), torch.zeros_like(batch.labels, dtype=torch.bool)
        loss = losses(logits, batch.labels, 0.0, None)
        wrong = (logits.argmax(1) != batch.labels) & (batch.weights > 0)
        return counts(logits, batch.labels, loss, batch.weights), wrong

    def _no_counts(self) -> Tensor:
        return torch.zeros(4, dtype=torch.float64, device=self.world.device)

    def update(self, plan: Plan) -> bool:
        """Updates the weights with the accumulated gradients; False if they overflowed and no rank updated."""
        if self.masters:
            self.masters.take_gradients()
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        applied = self.scale.unscale(gradients)
        if applied:
            if self.config.clip_norm:
                torch.nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
            set_rate(self.optimizer, plan.rate)
            self.optimizer.step()
            if self.masters:
                self.masters.publish()
            if self.ema:
                self.ema.update(self.model, plan.update)
        self.wrapped.zero_grad(set_to_none=not isinstance(self.wrapped, DistributedDataParallel))
        return applied

    def gather_to_rank0(self) -> None:
        """Sends rank 0 the parts of the model that it lacks; called on every rank before a checkpoint. Here: none."""

    def optimizer_state(self) -> dict[str, Any]:
        """The optimiser's state for a checkpoint; call after `gather_to_rank0`."""
        return self.optimizer.state_dict()

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Restores the optimiser's state, but not its settings.

        Raises:
            TrainError: the state is that of a model cut into stages, or the other way round.
        """
        if "stages" in state:
            raise TrainError(f"the checkpoint has {len(state['stages'])} stages; use the same --parallel")
        load_state(self.optimizer, state)

    @property
    def evaluated(self) -> nn.Module:
        """The model to validate: the averaged weights if there are any."""
        return self.ema.model if self.ema else self.model
