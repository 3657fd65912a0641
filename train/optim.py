"""The optimiser: SGD with momentum, its rate set before every step from the schedule."""

from __future__ import annotations

import torch
from torch import nn

from train.config import Config


def make_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """SGD over all trainable parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next step, for every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
