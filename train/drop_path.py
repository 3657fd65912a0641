"""Stochastic depth, also called drop path (Huang et al., arXiv 1603.09382); the rate grows linearly with the depth.

The models implement it; this module sets its rate. Random numbers come from torch's generator, as for dropout.
"""

from __future__ import annotations

from torch import nn

from train import foreign
from train.errors import TrainError

OWN = -1.0  # the default rate of the architecture
IN_CONSTRUCTOR = ("convnext", "efficientnet")  # torchvision models; the others have a fixed rate


def keyword(arch: str) -> str | None:
    """Return the name of the constructor's rate argument, or None."""
    if foreign.is_foreign(arch):
        return "drop_path_rate"
    return "stochastic_depth_prob" if arch.startswith(IN_CONSTRUCTOR) else None


def set_rate(model: nn.Module, arch: str, rate: float) -> None:
    """Scale the rates of a torchvision model so that the last block has `rate`.

    Raises:
        TrainError: the model has no stochastic depth.
    """
    from torchvision.ops import StochasticDepth  # imported here, as in `models`

    parts = [part for part in model.modules() if isinstance(part, StochasticDepth)]
    last = max((part.p for part in parts), default=0.0)
    if not last:
        raise TrainError(
            f"--drop-path {rate}: --arch {arch} has no stochastic depth; use torchvision's convnext*, efficientnet*, "
            f"swin* or maxvit*, or a timm model such as timm:resnet50"
        )
    for part in parts:
        part.p *= rate / last
