"""The loss: of logits against labels, of images that are mixed with others, or both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from train.config import Config
from train.own import is_own, own, tried, unfit

Loss = Callable[[Tensor, Tensor], Tensor]  # logits (n, classes), labels (n,) -> losses (n,)


@dataclass(frozen=True)
class Mix:
    """Mix of two images: `share` of the image and the rest of its neighbour, blended or as a patch (`box`)."""

    share: float
    box: tuple[int, int, int, int] | None  # top, bottom, left, right


def draw_mix(config: Config, seed: int, side: int) -> Mix | None:
    """Draw the mix of one step from the step's seed: mixup or cutmix, or one of them at random if both are enabled.

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
    """Mix image i with image i - 1; (n, 3, H, W)."""
    other = images.roll(1, 0)
    if mix.box is None:
        return torch.lerp(other, images, mix.share)
    top, bottom, left, right = mix.box
    mixed = images.clone(memory_format=torch.preserve_format)
    mixed[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    return mixed


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the (n,) losses of (n, classes) logits."""
    return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


def binary_cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the (n,) losses, summed over classes: Wightman et al., arXiv 2110.00476, section 3.2."""
    target = functional.one_hot(labels, logits.shape[1]) * (1 - smoothing) + smoothing / logits.shape[1]
    each = functional.binary_cross_entropy_with_logits(logits, target.to(logits.dtype), reduction="none")
    return each.sum(1)


def make_loss(config: Config) -> Loss:
    """Return the loss function of training, --loss. Raises TrainError: see `own`."""
    if is_own(config.loss):
        return own("loss", config.loss)
    kinds = {"ce": cross_entropy, "bce": binary_cross_entropy}
    return partial(kinds[config.loss], smoothing=config.label_smoothing)


def try_loss(text: str, classes: int, dtype: torch.dtype, device: torch.device) -> None:
    """Call the user's loss function. Raises TrainError if it does not return losses that depend on the logits."""
    logits = torch.linspace(-1, 1, 3 * classes, dtype=dtype, device=device).view(3, classes).requires_grad_()
    found = tried("loss", text, logits, torch.arange(3, device=device) % classes)
    if not isinstance(found, Tensor):
        raise unfit("loss", text, f"a {type(found).__name__}")
    if found.shape != (3,):
        raise unfit("loss", text, f"shape {tuple(found.shape)} for logits of shape {tuple(logits.shape)}")
    if not found.requires_grad:
        raise unfit("loss", text, "values without a gradient")


def losses(loss: Loss, logits: Tensor, labels: Tensor, mix: Mix | None = None) -> Tensor:
    """Return the (n,) losses; for mixed images the mean over both labels, weighted by share."""
    each = loss(logits, labels)
    return each if mix is None else torch.lerp(loss(logits, labels.roll(1, 0)), each, mix.share)
