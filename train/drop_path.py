"""Stochastic depth, also called drop path: Huang et al., arXiv 1603.09382; the rate grows linearly with the depth.

The models have it themselves; this module sets its rate. Their draws are from torch's generator, as dropout's.
"""

from __future__ import annotations

from torch import nn

from train import foreign
from train.errors import TrainError

OWN = -1.0  # the rate with which the architecture is published
IN_CONSTRUCTOR = ("convnext", "efficientnet")  # of torchvision's; the others have their rate fixed


def keyword(arch: str) -> str | None:
    """The constructor's name of the rate; None: it takes none."""
    if foreign.is_foreign(arch):
        return "drop_path_rate"
    return "stochastic_depth_prob" if arch.startswith(IN_CONSTRUCTOR) else None


def set_rate(model: nn.Module, arch: str, rate: float) -> None:
    """Scales the rates of one of torchvision's models, such that the last block's is `rate`.

    Raises:
        TrainError: the model has no stochastic depth.
    """
    from torchvision.ops import StochasticDepth  # imported here, as in `models`

    parts = [part for part in model.modules() if isinstance(part, StochasticDepth)]
    last = max((part.p for part in parts), default=0.0)
    if not last:
        raise TrainError(
            f"--drop-path {rate}: --arch {arch} has no stochastic depth; torchvision's convnext*, efficientnet*, swin* "
            f"and maxvit* have, and many of timm's, such as timm:resnet50"
        )
    for part in parts:
        part.p *= rate / last
