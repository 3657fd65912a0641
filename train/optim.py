"""Optimisers by name, without weight decay on biases and norms; LARS is our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from train import foreach
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
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            for matrices in (True, False):
                self._update([parameter for parameter in used if (parameter.ndim > 1) == matrices], group, matrices)

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any], matrices: bool) -> None:
        if not parameters:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        rate = group["lr"]
        if matrices:
            decay, weights, slopes = group["weight_decay"], foreach.norms(parameters), foreach.norms(gradients)
            local = group["eta"] * weights / (slopes + decay * weights)
            # stays on the device: one kernel per matrix is queued, which costs less than to wait for the norms
            rates = torch.where((weights > 0) & (slopes > 0), rate * local, rate)
            gradients, rate = foreach.scaled(foreach.sums(gradients, parameters, decay), rates), 1.0
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        velocities = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        foreach.multiply_(velocities, group["momentum"])
        foreach.add_(velocities, gradients, rate)
        foreach.add_(parameters, velocities, -1.0)


def make_optimizer(config: Config, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser over `parameters`, in one group with weight decay and one without."""
    decayed = [p for p in parameters if p.ndim > 1 or config.decay == "all"]
    others = [p for p in parameters if not (p.ndim > 1 or config.decay == "all")]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    # torch has no fused SGD for divided weights
    fused = config.parallel != "fsdp" and all(p.dtype == torch.float32 and has_fused_kernel(p) for p in parameters)
    make: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused
        ),
        "lars": lambda: LARS(groups, lr=config.lr, momentum=config.momentum, eta=config.lars_eta),
        "adamw": lambda: torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.momentum, config.adam_beta2), fused=fused
        ),
    }
    return make[config.optimizer]()


def has_fused_kernel(parameter: nn.Parameter) -> bool:
    """Whether an update is one kernel instead of several, and faster; torch's for CPUs is not."""
    return parameter.device.type == "cuda"


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restores momenta and such; the settings stay those of `optimizer`, which `load_state_dict` would replace."""
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state["state"], "param_groups": settings})


def set_rate(optimizer: torch.optim.Optimizer, rate: float, momentum: float | None = None) -> None:
    """Sets the rate of the next step in every parameter group, and its momentum unless that is None."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        if momentum is not None:
            group["momentum"] = momentum
