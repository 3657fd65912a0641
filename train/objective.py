"""The loss of a micro-batch: cross-entropy with label smoothing, optionally on images mixed by mixup or cutmix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from train.config import Config


@dataclass(frozen=True)
class Mix:
    """How two images become one: `share` of the image and the rest of its neighbour, blended or as a patch (`box`)."""

    share: float
    box: tuple[int, int, int, int] | None  # top, bottom, left, right


def draw_mix(config: Config, seed: int, side: int) -> Mix | None:
    """The mix of one step, drawn from that step's seed; mixup or cutmix, or a random one of them if both are on.

    Zhang et al., arXiv 1710.09412; Yun et al., arXiv 1905.04899.
    """
    kinds = [kind for kind, alpha in (("mixup", config.mixup), ("cutmix", config.cutmix)) if alpha > 0]
    if not kinds:
        return None
    draw = np.random.Generator(np.random.Philox(seed))
    kind = kinds[int(draw.integers(len(kinds)))]
    if kind == "mixup":
        return Mix(float(draw.beta(config.mixup, config.mixup)), None)
    share = float(draw.beta(config.cutmix, config.cutmix))
    half = side * math.sqrt(1 - share) / 2
    y, x = draw.integers(side, size=2)
    top, bottom, left, right = (round(min(max(v, 0), side)) for v in (y - half, y + half, x - half, x + half))
    return Mix(1 - (bottom - top) * (right - left) / side**2, (top, bottom, left, right))


def apply_mix(mix: Mix, images: Tensor) -> Tensor:
    """Mixes image i with image i - 1; (n, 3, H, W)."""
    other = images.roll(1, 0)
    if mix.box is None:
        return torch.lerp(other, images, mix.share)
    top, bottom, left, right = mix.box
    mixed = images.clone(memory_format=torch.preserve_format)
    mixed[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    return mixed


def wide(logits: Tensor) -> Tensor:
    """16-bit logits as fp32, which a softmax over a thousand classes needs."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def losses(logits: Tensor, labels: Tensor, smoothing: float, mix: Mix | None) -> Tensor:
    """(n,) losses; a mixed image's loss is the mean over both labels, weighted by their shares."""
    loss = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    if mix is None:
        return loss
    other = functional.cross_entropy(logits, labels.roll(1, 0), reduction="none", label_smoothing=smoothing)
    return torch.lerp(other, loss, mix.share)
