"""Mixed precision: autocast, or 16-bit weights with fp32 master weights, and the loss scale that fp16 needs.

The levels are apex's, as experiment 1 reports them: O0 off, O1 autocast per operator, O2 fp16 weights with fp32 batch
norm and fp32 master weights, O3 fp16 throughout. The default is bf16 autocast if the hardware has it; bf16 needs no
loss scale.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from train.config import Config
from train.foreach import add_, all_finite, copy_, multiply_, zero_
from train.syncbn import BATCH_NORMS


class TensorCores(TorchFunctionMode):
    """16-bit products on a CPU as on a GPU's tensor cores: 16-bit inputs, fp32 sums, rounded to 16 bits once.

    torch's own fp16 convolutions on CPU sum gradients image by image in fp16, unlike any GPU, and are 30 times slower.
    """

    PRODUCTS = frozenset((functional.conv1d, functional.conv2d, functional.conv3d, functional.linear, torch.matmul))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes products of fp16 tensors in fp32; through the casts' gradients this holds for backward too."""
        half = args and isinstance(args[0], Tensor) and args[0].dtype is torch.float16
        if not (half and func in self.PRODUCTS):
            return func(*args, **(kwargs or {}))
        wide = [value.float() if isinstance(value, Tensor) else value for value in args]
        named = {key: value.float() if isinstance(value, Tensor) else value for key, value in (kwargs or {}).items()}
        return func(*wide, **named).half()


@dataclass(frozen=True)
class Precision:
    """The number types of a run."""

    name: str  # none, bf16, fp16 (O1), O2, O3
    weights: torch.dtype  # type of the model's weights and inputs
    autocast: torch.dtype | None
    masters: bool  # fp32 copies of the weights, which the optimiser updates
    scaled: bool  # a dynamic loss scale
    layout: torch.memory_format  # of images
    weights_layout: torch.memory_format  # the same, except where weights are divided

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Autocast, or TensorCores for 16-bit weights on a CPU, or a null context."""
        if self.autocast:
            return torch.autocast(device.type, self.autocast)
        return TensorCores() if self.weights is torch.float16 and device.type == "cpu" else nullcontext()

    def cast(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Moves the model to the device, in this precision's types and memory layout; O2 keeps batch norm in fp32."""
        model = model.to(device, self.weights, memory_format=self.weights_layout)  # type: ignore[call-overload]
        if self.masters:
            for module in model.modules():
                if isinstance(module, BATCH_NORMS):
                    module.float()
        return model


class InContext(nn.Module):
    """`module` in the run's autocast, for methods that call it on threads: autocast's type is a setting per thread."""

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
        # before Ampere bf16 is emulated and slower than fp32, so check the capability, not is_bf16_supported()
        name = "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"
    auto = device.type == "cuda" and config.parallel != "pipeline"  # whose stages send and receive contiguous tensors
    nhwc = config.memory_format == "channels_last" or (config.memory_format == "auto" and auto)
    layout = torch.channels_last if nhwc else torch.contiguous_format
    return Precision(
        name,
        torch.float16 if name in ("O2", "O3") else getattr(torch, config.dtype),
        {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name),
        masters=name == "O2",
        scaled=name in ("fp16", "O2"),
        layout=layout,
        # fully_shard refuses others; cuDNN brings a gathered weight into the layout of the images
        weights_layout=torch.contiguous_format if config.parallel == "fsdp" else layout,
    )


class LossScale:
    """Dynamic loss scale: starts at 2^16, doubles after 2000 clean steps (cap 2^24), halves when a gradient overflows.

    Micikevicius et al., arXiv 1710.03740, section 3.2. If disabled, it is 1 and nothing is checked.
    """

    GROWTH_INTERVAL, CAP = 2000, 2.0**24

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = 2.0**16 if enabled else 1.0
        self._clean = 0

    @torch.no_grad()
    def unscale(self, gradients: list[Tensor]) -> bool:
        """Divides the gradients by the scale; if any is inf or nan, halves the scale and returns False.

        All ranks have the same reduced gradients, so all make the same decision.
        """
        if not self.enabled:
            return True
        multiply_(gradients, 1 / self.value)
        if not all_finite(gradients):
            self.value, self._clean = max(self.value / 2, 1.0), 0
            return False
        self._clean += 1
        if self._clean == self.GROWTH_INTERVAL:
            self.value, self._clean = min(self.value * 2, self.CAP), 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Scale and clean steps, if a scale is used."""
        return {"value": self.value, "clean": self._clean} if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state, if a scale is and was used."""
        if self.enabled and state:
            self.value, self._clean = state["value"], state["clean"]


class Masters:
    """fp32 copies of 16-bit weights: the optimiser updates the copies, the model gets them rounded.

    Micro-batches' gradients are added in fp32, too: `set_aside` after each but the last, `add_back` before the last,
    whose gradients are then reduced over the ranks with them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parameters = [nn.Parameter(p.detach().float().clone()) for p in self._model]
        self._aside: list[Tensor] = []

    def _gradients(self) -> list[tuple[int, Tensor]]:
        return [(place, p.grad) for place, p in enumerate(self._model) if p.grad is not None]

    @torch.no_grad()
    def set_aside(self) -> None:
        """Moves the model's gradients to the sums."""
        self._aside = self._aside or [torch.zeros_like(parameter) for parameter in self.parameters]
        gradients = self._gradients()
        add_([self._aside[place] for place, _ in gradients], [gradient.float() for _, gradient in gradients])
        zero_([gradient for _, gradient in gradients])

    @torch.no_grad()
    def add_back(self) -> None:
        """Moves the sums, rounded, to the model's gradients."""
        if self._aside:
            gradients = self._gradients()
            copy_([gradient for _, gradient in gradients], [self._aside[place] for place, _ in gradients])
            zero_(self._aside)

    def take_gradients(self) -> None:
        """Copies the model's gradients, in fp32, to the masters."""
        gradients = self._gradients()
        for place, _ in gradients:
            if self.parameters[place].grad is None:
                self.parameters[place].grad = torch.empty_like(self.parameters[place])
        own = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        copy_(own, [gradient for _, gradient in gradients])

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the masters, rounded, to the model's weights."""
        copy_(list(self._model), list(self.parameters))
