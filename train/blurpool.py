"""Anti-aliased strided convolutions (Zhang, arXiv 1904.11486), as in ffcv's ImageNet example.

https://github.com/libffcv/ffcv-imagenet, train_imagenet.py: before every convolution with a stride and at least 16
input channels, each channel is blurred by a 3x3 binomial filter. The state dict has ffcv's names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from train.errors import TrainError

MIN_CHANNELS = 16


class BlurredConv(nn.Module):
    """Applies `conv` to the blurred input."""

    blur_filter: Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("blur_filter", torch.outer(row, row).repeat(conv.in_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Same shapes as `conv`."""
        blurred = functional.conv2d(x, self.blur_filter, padding=1, groups=self.conv.in_channels)
        out: Tensor = self.conv(blurred)
        return out


def with_blurred_strides(model: nn.Module, arch: str) -> nn.Module:
    """Replace strided convolutions of the model by `BlurredConv`; return the model.

    Raises:
        TrainError: the model has none.
    """
    strided = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Conv2d) and max(part.stride) > 1 and part.in_channels >= MIN_CHANNELS
    ]
    if not strided:
        raise TrainError(
            f"--blurpool: --arch {arch} has no strided convolution with {MIN_CHANNELS} or more input channels; "
            f"remove the option"
        )
    for name in strided:
        parent, _, own = name.rpartition(".")
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        setattr(model.get_submodule(parent), own, BlurredConv(conv))
    return model
