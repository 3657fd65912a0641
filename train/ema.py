"""Exponential moving average of the weights, which late in training is more accurate than the weights themselves."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class EMA:
    """average <- d*average + (1 - d)*weights after every update, d = min(decay, (1 + t)/(10 + t)) at update t.

    The warm-up of d is TensorFlow's (ExponentialMovingAverage, num_updates). Running statistics are averaged the same
    way; integers are copied. Averages are in at least fp32, because 16 bits would round small changes away.
    """

    def __init__(self, model: nn.Module, decay: float, weights: Sequence[Tensor]) -> None:
        """`weights`: what the optimiser updates, the model's trainable parameters or their fp32 masters, in order."""
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._weights = dict(zip(trained, weights, strict=True))
        # 16-bit weights of the model are rounded copies of their averages; all others are the averages
        self._own: dict[str, Tensor] = self.model.state_dict()
        self.averages = {
            name: value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
            for name, value in self._own.items()
        }

    @torch.no_grad()
    def update(self, model: nn.Module, updates: int) -> None:
        """Averages in the weights after update number `updates` (counted from 0)."""
        decay = min(self._decay, (1 + updates) / (10 + updates))
        now = model.state_dict() | self._weights
        floats = [name for name, value in self.averages.items() if value.is_floating_point()]
        average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # torch's own
        kinds = [self.averages[name].dtype for name in floats]
        fresh = [now[name].detach().to(kind) for name, kind in zip(floats, kinds, strict=True)]
        average([self.averages[name] for name in floats], fresh, updates)
        self.load({name: now[name] for name in self.averages.keys() - set(floats)})

    @torch.no_grad()
    def load(self, averages: Mapping[str, Tensor]) -> None:
        """Sets some or all averages, and the model's weights to all averages."""
        for name, value in averages.items():
            self.averages[name].copy_(value)
        for name, value in self._own.items():
            if value is not self.averages[name]:
                value.copy_(self.averages[name])
