"""Augmentation of a training image, drawn from random numbers: crop, shift and flip, then changes of its pixels.

The decoders compute the first (`View`), `policy` and `on_device` the second (`Changes`): TrivialAugment (Mueller and
Hutter, arXiv 2103.10158, wide), RandAugment (Cubuk et al., arXiv 1909.13719), colour jitter and random erasing (Zhong
et al., arXiv 1708.04896), as in torchvision's classes, which are not used because they draw from one generator for all
threads, so a resumed run would get other images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

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
    if config.augment not in ("shift", "none"):
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


BINS = 31  # number of strengths
# name: maximum in RandAugment and in TrivialAugment (wide); signed values may be negated
SIGNED = {
    "shear_x": (0.3, 0.99),
    "shear_y": (0.3, 0.99),
    "translate_x": (150 / 331, 32.0),  # RandAugment: fraction of the side; TrivialAugment: pixels
    "translate_y": (150 / 331, 32.0),
    "rotate": (30.0, 135.0),
    "brightness": (0.9, 0.99),
    "saturation": (0.9, 0.99),
    "contrast": (0.9, 0.99),
    "sharpness": (0.9, 0.99),
}
UNSIGNED = {"posterize": (4.0, 6.0), "solarize": (255.0, 255.0), "autocontrast": None, "equalize": None}
OPERATIONS = ("identity", *SIGNED, *UNSIGNED)
JITTER = ("brightness", "contrast", "saturation", "hue")
ERASED_AREA, ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)


@dataclass(frozen=True)
class Operation:
    """An operation. `value`: the argument of torchvision's function of that name.

    A factor for brightness, contrast, saturation and sharpness, a shift for hue, degrees for shears and the rotation,
    pixels for translations, bits for posterize, a threshold for solarize.
    """

    name: str
    value: float = 0.0


@dataclass(frozen=True)
class Changes:
    """Operations in order, then the box that is erased: top, left, height, width."""

    operations: tuple[Operation, ...] = ()
    box: tuple[int, int, int, int] | None = None


class Coin(Protocol):
    """A random source for signs."""

    def random(self) -> float:
        """Return a uniform number in [0, 1)."""


def enabled(config: Config) -> bool:
    """Whether the options enable any change."""
    return config.auto_augment != "none" or any(config.color_jitter) or config.random_erase > 0


def draw(config: Config, seed: float, side: int) -> Changes:
    """Draw the changes of an image of `side` pixels with random numbers from `seed` in [0, 1)."""
    numbers = np.random.Generator(np.random.Philox(int(seed * 2**53)))
    operations: list[Operation] = []
    if config.auto_augment == "trivial":
        name = OPERATIONS[numbers.integers(len(OPERATIONS))]
        operations.append(operation(name, int(numbers.integers(BINS)), True, side, numbers))
    elif config.auto_augment == "rand":
        for _ in range(config.rand_operations):
            name = OPERATIONS[numbers.integers(len(OPERATIONS))]
            operations.append(operation(name, config.rand_magnitude, False, side, numbers))
    if any(config.color_jitter):
        operations += _jitter(config, numbers)
    box = _box(side, numbers) if numbers.random() < config.random_erase else None
    return Changes(tuple(operations), box)


def operation(name: str, strength: int, wide: bool, side: int, coin: Coin) -> Operation:
    """Return an operation with a strength of 0 to BINS - 1; `wide`: TrivialAugment, else RandAugment."""
    value = 0.0
    if strongest := SIGNED.get(name) or UNSIGNED.get(name):
        value = strongest[wide] * strength / (BINS - 1)
    if name in SIGNED and coin.random() < 0.5:
        value = -value
    if name.startswith("translate"):
        value = int(value if wide else value * side)
    elif name.startswith("shear"):
        value = math.degrees(math.atan(value))
    elif name in ("brightness", "saturation", "contrast", "sharpness"):
        value = 1 + value
    elif name == "posterize":
        value = 8 - round(value)
    elif name == "solarize":
        value = 255 - value
    return Operation(name, value)


def _jitter(config: Config, numbers: np.random.Generator) -> list[Operation]:
    """Draw brightness, contrast and saturation factors in 1 +- x and a hue shift in +- x, in random order."""
    found = []
    for index in numbers.permutation(len(JITTER)):
        if reach := config.color_jitter[index]:
            name = JITTER[index]
            low, middle = (0.0, 1.0) if name != "hue" else (-0.5, 0.0)
            found.append(Operation(name, numbers.uniform(max(middle - reach, low), middle + reach)))
    return found


def _box(side: int, numbers: np.random.Generator) -> tuple[int, int, int, int] | None:
    """Draw a box with 2 to 33 % of the area."""
    for _ in range(TRIES):
        area = numbers.uniform(*ERASED_AREA) * side**2
        ratio = math.exp(numbers.uniform(math.log(ERASED_RATIO[0]), math.log(ERASED_RATIO[1])))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if height < side and width < side:
            top, left = numbers.integers(side - height + 1), numbers.integers(side - width + 1)
            return int(top), int(left), height, width
    return None


def erased_colour(config: Config) -> tuple[int, int, int]:
    """Return the mean colour, which is 0 after normalisation."""
    red, green, blue = (round(255 * mean) for mean in config.mean)
    return red, green, blue
