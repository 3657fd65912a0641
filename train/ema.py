"""The moving average of the weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from train.foreach import copy_

HALF = (torch.float16, torch.bfloat16)


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
        own: dict[str, Tensor] = self.model.state_dict()
        first = _first_names(own)
        # 16-bit weights of the model are rounded copies of their averages; all others are the averages
        once = {
            name: value.float() if value.dtype in HALF else value for name, value in own.items() if first[name] == name
        }
        self.averages = {name: once[first[name]] for name in own}
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        now = model.state_dict() | dict(zip(trained, weights, strict=True))
        # listed once: weights and statistics are changed in place for the whole run
        floats = [name for name, value in once.items() if value.is_floating_point()]
        integers = [name for name, value in once.items() if not value.is_floating_point()]
        rounded = [name for name, value in once.items() if value is not own[name]]
        self._floats = _pick(self.averages, floats), _pick(now, floats)
        self._integers = _pick(self.averages, integers), _pick(now, integers)
        self._rounded = _pick(own, rounded), _pick(self.averages, rounded)

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """Update the averages after update number `updates` (counted from 0)."""
        decay = min(self._decay, (1 + updates) / (10 + updates))
        average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # torch's own
        averages, now = map(self._local, self._floats)
        average(averages, [new.to(old.dtype) for old, new in zip(averages, now, strict=True)], updates)
        copy_(*map(self._local, self._integers))
        copy_(*self._rounded)

    @torch.no_grad()
    def load(self, averages: Mapping[str, Tensor]) -> None:
        """Load some or all averages, and copy all averages to the model's weights."""
        for name, value in averages.items():
            self.averages[name].copy_(value)
        copy_(*self._rounded)

    def _local(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return this rank's part of each tensor."""
        return tensors


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for each name the first one of the same tensor: tied weights have several, but are averaged once."""
    names: dict[object, str] = {}
    return {
        name: names.setdefault((value.data_ptr(), value.shape, value.stride()), name) for name, value in tensors.items()
    }


def _pick(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[Tensor]:
    return [tensors[name].detach() for name in names]
