"""Mixed precision: autocast, or 16-bit weights with fp32 master weights, and the gradient scaler that fp16 needs.

The levels are those of apex, as in experiment 1: O0 off, O1 autocast per operator, O2 fp16 weights with fp32 batch
norm and fp32 master weights, O3 fp16 throughout. The default is bf16 autocast if the hardware has it; bf16 needs no
loss scale.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from train.config import Config
from train.foreach import finite, multiply_
from train.models import BATCH_NORMS


@dataclass(frozen=True)
class Precision:
    """Data types and memory layout of a run."""

    name: str  # none, bf16, fp16 (O1), O2, O3
    weights: torch.dtype  # type of the model's weights and inputs
    autocast: torch.dtype | None
    masters: bool  # fp32 copies of the weights, which the optimiser updates
    scaled: bool  # a dynamic loss scale
    layout: torch.memory_format  # of images
    weights_layout: torch.memory_format  # the same, unless weights are sharded

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return autocast, TensorCores for 16-bit weights on a CPU, or a null context."""
        if self.autocast:
            return torch.autocast(device.type, self.autocast)
        if self.weights is torch.float16 and device.type == "cpu":
            from train.experiments.tensor_cores import TensorCores

            return TensorCores()
        return nullcontext()

    def cast(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move the model to the device, with this precision's types and memory layout; O2 keeps batch norm in fp32."""
        norms = [module for module in model.modules() if isinstance(module, BATCH_NORMS)] if self.masters else []
        exact = [module.state_dict() for module in norms]  # fp16 would round these, and has no number above 65504
        model = model.to(device, self.weights, memory_format=self.weights_layout)  # type: ignore[call-overload]
        for module, values in zip(norms, exact, strict=True):
            module.float().load_state_dict(values)
        return model

    @torch.no_grad()
    def trial(self, model: nn.Module, images: Tensor, device: torch.device) -> Any:
        """Return the output of the model for (n, 3, H, W) images, computed as in the run; the model does not change."""
        norms = [module for module in model.modules() if self.masters and isinstance(module, BATCH_NORMS)]
        exact = {id(value) for norm in norms for value in (*norm.parameters(), *norm.buffers())}

        def placed(value: Tensor, copy: bool = False) -> Tensor:
            kept = id(value) in exact or not value.is_floating_point()
            return value.to(device, value.dtype if kept else self.weights, copy=copy)

        state = {name: placed(value) for name, value in model.named_parameters()}
        state |= {name: placed(value, copy=True) for name, value in model.named_buffers()}
        with self.context(device):
            return functional_call(model, state, (placed(images).contiguous(memory_format=self.layout),))


class InContext(nn.Module):
    """Runs `module` in the run's autocast context, for methods that call it on threads: autocast is set per thread."""

    def __init__(self, module: nn.Module, precision: Precision, device: torch.device) -> None:
        super().__init__()
        self.module, self._precision, self._device = module, precision, device

    def forward(self, x: Tensor) -> Tensor:
        with self._precision.context(self._device):
            out: Tensor = self.module(x)
        return out


def choose_precision(config: Config, device: torch.device) -> Precision:
    """--amp auto: bf16 if the GPU supports it in hardware, else fp16 with a loss scale; none on CPU."""
    name = {"O0": "none", "O1": "fp16"}.get(config.amp, config.amp)
    if name == "auto" and (device.type == "cpu" or config.dtype == "float64"):
        name = "none"
    elif name == "auto":
        # before Ampere, bf16 is emulated and slower than fp32: check the capability, not is_bf16_supported()
        name = "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"
    auto = (
        device.type == "cuda" and config.parallel != "pipeline"
    )  # pipeline stages send and receive contiguous tensors
    nhwc = config.memory_format == "channels_last" or (config.memory_format == "auto" and auto)
    layout = torch.channels_last if nhwc else torch.contiguous_format
    return Precision(
        name,
        torch.float16 if name in ("O2", "O3") else getattr(torch, config.dtype),
        {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name),
        masters=name == "O2",
        scaled=name in ("fp16", "O2"),
        layout=layout,
        # fully_shard accepts no other; cuDNN converts a gathered weight to the layout of the images
        weights_layout=torch.contiguous_format if config.shards_weights else layout,
    )


class LossScale:
    """The gradient scaler: from 2^16, doubled after 2000 clean steps (cap 2^24), halved when a gradient overflows.

    Micikevicius et al., arXiv 1710.03740, section 3.2. If disabled, the scale is 1 and gradients are not checked.
    """

    GROWTH_INTERVAL, CAP = 2000, 2.0**24

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = 2.0**16 if enabled else 1.0
        self._clean = 0

    @torch.no_grad()
    def unscale(self, gradients: list[Tensor], everywhere: Callable[[Tensor], Tensor] = lambda finite: finite) -> bool:
        """Divide the gradients by the scale; if any is inf or nan, halve the scale and return False.

        All ranks decide the same: they have the same reduced gradients, or, if each has a shard of these, learn from
        `everywhere` whether those of all are finite.
        """
        if not self.enabled:
            return True
        multiply_(gradients, 1 / self.value)
        if not everywhere(finite(gradients)):
            self.value, self._clean = max(self.value / 2, 1.0), 0
            return False
        self._clean += 1
        if self._clean == self.GROWTH_INTERVAL:
            self.value, self._clean = min(self.value * 2, self.CAP), 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the clean steps, if enabled."""
        return {"value": self.value, "clean": self._clean} if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, if enabled now and when it was saved."""
        if self.enabled and state:
            self.value, self._clean = state["value"], state["clean"]
