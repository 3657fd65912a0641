"""Optimisers by name, with the parameter groups of `groups`; LARS is implemented here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from train import foreach
from train.config import Config
from train.groups import parameter_groups
from train.muon import MuonAdamW


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rates: You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1.

    local = eta*|w| / (|g| + wd*|w|), 1 if a norm is 0; v = m*v + lr*local*(g + wd*w); w -= v. One-dimensional tensors
    (biases, norms) get plain momentum SGD without decay.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.9, weight_decay: float = 0.0, eta: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta})
        self._scaled: dict[int, foreach.Scaled] = {}  # by group number

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so no loss to return
        assert closure is None, "LARS takes no closure"
        for number, group in enumerate(self.param_groups):
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            for matrices in (True, False):
                chosen = [parameter for parameter in used if (parameter.ndim > 1) == matrices]
                self._update(chosen, group, number if matrices else None)

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any], matrices: int | None) -> None:
        """`matrices`: the group number, or None for one-dimensional parameters."""
        if not parameters:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        rate = group["lr"]
        if matrices is not None:
            decay, weights, slopes = group["weight_decay"], foreach.norms(parameters), foreach.norms(gradients)
            local = group["eta"] * weights / (slopes + decay * weights)
            rates = torch.where(
                (weights > 0) & (slopes > 0), rate * local, rate
            )  # not read on the CPU, which would wait for the device
            scaled = self._scaled.get(matrices)
            if scaled is None or not scaled.fits(parameters):
                scaled = self._scaled[matrices] = foreach.Scaled(parameters)
            foreach.copy_(scaled.values, gradients)
            foreach.add_(scaled.values, parameters, decay)
            scaled.multiply_(rates)
            gradients, rate = scaled.values, 1.0
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        velocities = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        foreach.multiply_(velocities, group["momentum"])
        foreach.add_(velocities, gradients, rate)
        foreach.add_(parameters, velocities, -1.0)


def make_optimizer(
    config: Config, model: nn.Module, parameters: Sequence[nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """Return the optimiser for the model's trainable parameters, or for their fp32 masters `parameters`, in order.

    Raises:
        TrainError: see `MuonAdamW`.
    """
    parameters = parameters or [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = parameter_groups(config, model, parameters)
    # torch has no fused SGD for sharded weights
    fused = config.parallel != "fsdp" and all(p.dtype == torch.float32 and has_fused_kernel(p) for p in parameters)
    make: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused
        ),
        "lars": lambda: LARS(groups, lr=config.lr, momentum=config.momentum, eta=config.lars_eta),
        "adamw": lambda: torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.momentum, config.adam_beta2), fused=fused
        ),
        "muon": lambda: MuonAdamW(groups, config.lr, config.muon_momentum, (config.momentum, config.adam_beta2), fused),
    }
    return make[config.optimizer]()


def has_fused_kernel(parameter: nn.Parameter) -> bool:
    """Whether the fused update is faster; torch's CPU version is not."""
    return parameter.is_cuda


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore momenta and other state, but keep the settings of `optimizer`, which `load_state_dict` would replace.

    State tensors get the memory layout of the parameters. With another layout, fused kernels fail on GPUs and give
    wrong results on CPUs.
    """
    settings = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state["state"], "param_groups": settings})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter).copy_(value)


def set_rate(optimizer: torch.optim.Optimizer, rate: float, momentum: float | None = None) -> None:
    """Set the learning rate of every group, times its `lr_scale`, and the momentum unless it is None."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
        if momentum is not None:
            group["momentum"] = momentum
