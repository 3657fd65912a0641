"""Models whose gradients or outputs become nan: --arch tests.train.programs.diverging:FUNCTION.

POISONED_STEP: the backward pass, counted from 1, whose gradient is nan on rank POISONED_RANK.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn

from train.models import SmallCNN

passes = 0


class Poison(torch.autograd.Function):
    """Returns its input; its gradient is nan in one step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        global passes
        if gradients[0].device.type == "meta" or os.environ.get("RANK", "0") != os.environ.get("POISONED_RANK"):
            return gradients[0]
        passes += 1
        return gradients[0] * (torch.nan if passes == int(os.environ["POISONED_STEP"]) else 1)


class Poisoned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        poisoned: Tensor = Poison.apply(x)
        return poisoned


class Sick(SmallCNN):
    """Has a buffer that is not finite, as a mask."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("mask", torch.full((2,), -torch.inf))
        self.norm, self.poisoned = nn.BatchNorm2d(3), Poisoned()

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.poisoned(self.norm(images)))


def sick(num_classes: int) -> nn.Module:
    return Sick(num_classes)


def chain(num_classes: int) -> nn.Module:
    first = nn.Conv2d(3, 8, 3), Poisoned(), nn.ReLU()
    return nn.Sequential(*first, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))


class Blind(SmallCNN):
    """Knows nothing in evaluation."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + (0 if self.training else torch.nan)


def blind(num_classes: int) -> nn.Module:
    return Blind(num_classes)
