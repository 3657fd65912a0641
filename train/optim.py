"""Optimisers by name, without weight decay on biases and norms; LARS is our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from train.config import Config


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rates: You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1.

    local = eta*|w| / (|g| + wd*|w|), 1 if a norm is 0; v = m*v + lr*local*(g + wd*w); w -= v. One-dimensional tensors
    (biases, norms) get plain momentum SGD without decay.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.9, weight_decay: float = 0.0, eta: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so no loss to return
        assert closure is None, "LARS takes no closure"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, decay = parameter.grad, group["weight_decay"]
        assert gradient is not None
        rate: torch.Tensor | float = group["lr"]
        if parameter.ndim > 1:
            weight_norm, gradient_norm = parameter.norm(), gradient.norm()
            local = group["eta"] * weight_norm / (gradient_norm + decay * weight_norm)
            usable = (weight_norm > 0) & (gradient_norm > 0)  # stays on the device, so no synchronisation per layer
            rate = group["lr"] * torch.where(usable, local, torch.ones_like(local))
            gradient = gradient + decay * parameter
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient * rate)
        parameter.sub_(velocity)


def make_optimizer(config: Config, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser over `parameters`, in one group with weight decay and one without."""
    decayed = [p for p in parameters if p.ndim > 1 or config.decay == "all"]
    others = [p for p in parameters if not (p.ndim > 1 or config.decay == "all")]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    make: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov),
        "lars": lambda: LARS(groups, lr=config.lr, momentum=config.momentum, eta=config.lars_eta),
        "adamw": lambda: torch.optim.AdamW(groups, lr=config.lr, betas=(config.momentum, config.adam_beta2)),
    }
    return make[config.optimizer]()


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restores momenta and such; the settings stay those of `optimizer`, which `load_state_dict` would replace."""
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state["state"], "param_groups": settings})


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of the next step in every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
