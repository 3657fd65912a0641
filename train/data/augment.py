"""Augmentation: crop box, shift and flip of an image, from its size and random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from train.config import Config

TRIES = 10
FLIP, SEED = 4 * TRIES, 4 * TRIES + 1  # random numbers per image: four per crop attempt, the flip, the seed of `policy`
NUMBERS = SEED + 1


@dataclass(frozen=True)
class View:
    """A box (left, top, width, height) in source pixels, then a shift of the result and a horizontal flip.

    `inside`: the image is cropped, then resized; otherwise it is resized, then cropped, so that the filter also uses
    pixels next to the box.
    """

    box: tuple[float, float, float, float]
    shift: tuple[int, int] = (0, 0)
    flip: bool = False
    inside: bool = True


def validation_view(config: Config, width: int, height: int) -> View:
    """Return torchvision's Resize(val_resize) and CenterCrop(image_size), with its rounding, as one resampling."""
    crop = config.image_size
    resize = max(config.val_resize or round(crop * 256 / 224), crop)
    short = min(width, height)
    x, y = int(resize * width / short) / width, int(resize * height / short) / height  # scales
    left, top = round((x * width - crop) / 2), round((y * height - crop) / 2)
    return View((left / x, top / y, crop / x, crop / y), inside=False)


def training_view(config: Config, width: int, height: int, numbers: Sequence[float], side: int) -> View:
    """Return the augmented view of one image; `numbers`: NUMBERS uniforms in [0, 1); `side`: the result's."""
    flip = numbers[FLIP] < config.flip
    if config.augment == "crop":
        return View(random_box(width, height, config.crop_scale, numbers), flip=flip)
    centre = validation_view(config, width, height)
    if config.augment == "none":
        return replace(centre, flip=flip)
    reach = side // 8
    shift = (int(numbers[0] * (2 * reach + 1)) - reach, int(numbers[1] * (2 * reach + 1)) - reach)
    return replace(centre, shift=shift, flip=flip)


def random_box(width: int, height: int, scale: float, numbers: Sequence[float]) -> tuple[float, float, float, float]:
    """Return a random box, area in [scale, 1], log-uniform ratio in [3/4, 4/3] (Szegedy et al., arXiv 1409.4842).

    Ten attempts, as in torchvision's RandomResizedCrop, then the largest centred box with an allowed ratio.
    """
    low, high = math.log(3 / 4), math.log(4 / 3)
    for index in range(TRIES):
        area, ratio, x, y = numbers[4 * index : 4 * index + 4]
        target = width * height * (scale + (1 - scale) * area)
        aspect = math.exp(low + (high - low) * ratio)
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return (int(x * (width - w + 1)), int(y * (height - h + 1)), w, h)
    aspect = min(max(width / height, 3 / 4), 4 / 3)
    w, h = min(width, round(height * aspect)), min(height, round(width / aspect))
    return ((width - w) // 2, (height - h) // 2, w, h)
