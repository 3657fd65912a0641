"""Exponential moving average of the weights, which late in training is more accurate than the weights themselves."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class EMA:
    """average <- d*average + (1 - d)*weights after every update, d = min(decay, (1 + t)/(10 + t)) at update t.

    The warm-up of d is TensorFlow's (ExponentialMovingAverage, num_updates). Running statistics are averaged the same
    way; integers are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module, updates: int) -> None:
        """Averages in the weights after update number `updates` (counted from 0)."""
        decay = min(self._decay, (1 + updates) / (10 + updates))
        ours, theirs = self.model.state_dict(), model.state_dict()
        floats = [name for name, value in ours.items() if value.is_floating_point()]
        average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # torch's own
        average([ours[name] for name in floats], [theirs[name] for name in floats], updates)
        for name in ours.keys() - set(floats):
            ours[name].copy_(theirs[name])
