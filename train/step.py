"""One training step and one evaluation batch: normalise on the device, forward, backward, update."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from train.config import Config
from train.data.loader import Batch
from train.metrics import counts
from train.optim import set_rate
from train.parallel.world import World


@dataclass(frozen=True)
class Precision:
    """What is computed in which type."""

    weights: torch.dtype
    autocast: torch.dtype | None
    layout: torch.memory_format

    @property
    def name(self) -> str:
        """bf16, fp16, or none for no mixed precision."""
        return {None: "none", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.autocast]


def choose_precision(config: Config, device: torch.device) -> Precision:
    """--amp auto: bf16 where the GPU computes in it, else fp16 with a loss scaler; none on CPU."""
    amp = config.amp
    if amp == "auto" and (device.type == "cpu" or config.dtype == "float64"):
        amp = "none"
    elif amp == "auto":
        # emulated bf16 (before Ampere) is slower than fp32, so the capability counts, not is_bf16_supported()
        amp = "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"
    nhwc = config.memory_format == "channels_last" or (config.memory_format == "auto" and device.type == "cuda")
    return Precision(
        getattr(torch, config.dtype),
        {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp],
        torch.channels_last if nhwc else torch.contiguous_format,
    )


class Normalise(nn.Module):
    """(n, H, W, 3) uint8 -> (n, 3, H, W) of the weights' type, (x/255 - mean)/std, on the device."""

    def __init__(self, config: Config, precision: Precision, device: torch.device) -> None:
        super().__init__()
        mean = torch.tensor(config.mean, dtype=torch.float64) * 255
        std = torch.tensor(config.std, dtype=torch.float64) * 255
        self.scale = (1 / std).view(1, 3, 1, 1).to(device, precision.weights)
        self.shift = (-mean / std).view(1, 3, 1, 1).to(device, precision.weights)
        self.precision = precision

    def forward(self, images: Tensor) -> Tensor:
        """A view of uint8 NHWC is channels_last NCHW, so the conversion is the only copy."""
        x = images.permute(0, 3, 1, 2).to(self.precision.weights)
        return torch.addcmul(self.shift, x, self.scale).contiguous(memory_format=self.precision.layout)


class Step:
    """One update of the model, the same on every rank.

    The loss of a rank is its sum over samples x world / total: DDP's mean over ranks is then the mean over all
    samples of all ranks, also when the last batch of an epoch falls unevenly.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        precision: Precision,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.world, self.precision, self.model, self.optimizer = world, precision, model, optimizer
        self.normalise = Normalise(config, precision, world.device)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=precision.autocast is torch.float16)

    def __call__(self, batch: Batch, rate: float) -> tuple[Tensor, bool]:
        """The batch's (loss sum, correct, correct within 5, images) as float64 on the device; and if it was applied.

        It is not applied when fp16 gradients overflowed: then no rank applies it, since all hold the same sum.
        """
        device = self.world.device
        images = self.normalise(batch.images.to(device, non_blocking=True))
        labels, weights = batch.labels.to(device, non_blocking=True), batch.weights.to(device, non_blocking=True)
        set_rate(self.optimizer, rate)
        self.optimizer.zero_grad(set_to_none=False)
        with autocast(self.precision, device):
            logits = self.model(images)
            losses = functional.cross_entropy(logits, labels, reduction="none")
        loss = (losses * weights).sum() * (self.world.size / batch.total)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's stub
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return counts(logits.detach(), labels, losses.detach(), weights), self.scaler.get_scale() >= before


def autocast(precision: Precision, device: torch.device) -> Any:
    """The context in which operators choose their type, or none."""
    if precision.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, precision.autocast)
