"""Changes of a training image after its crop and flip: TrivialAugment, RandAugment, colour jitter, random erasing.

The operations are torchvision's public functions, on Pillow images, as in its published recipes: on tensors they take
twice the time (11 operations at 176 px: 2.5 against 5.4 ms on average). The random numbers are ours, from the image's
own seed: torchvision's classes draw from one generator for all threads, and a resumed run would see other images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from train.config import Config
from train.data.source import Pixels

BINS = 31  # strengths, from none to the strongest
# name: strongest RandAugment and TrivialAugment (wide); those with a sign go either way
SIGNED = {
    "shear_x": (0.3, 0.99),
    "shear_y": (0.3, 0.99),
    "translate_x": (150 / 331, 32.0),  # RandAugment: of the side; TrivialAugment: pixels
    "translate_y": (150 / 331, 32.0),
    "rotate": (30.0, 135.0),
    "brightness": (0.9, 0.99),
    "saturation": (0.9, 0.99),
    "contrast": (0.9, 0.99),
    "sharpness": (0.9, 0.99),
}
UNSIGNED = {"posterize": (4.0, 6.0), "solarize": (255.0, 255.0), "autocontrast": None, "equalize": None}
OPERATIONS = ("identity", *SIGNED, *UNSIGNED)
ERASED_AREA, ERASED_RATIO, TRIES = (0.02, 0.33), (0.3, 3.3), 10


@dataclass(frozen=True)
class Policy:
    """The changes that the options ask for."""

    config: Config
    functions: Any  # torchvision.transforms.v2.functional
    bilinear: Any

    def __call__(self, pixels: Pixels, seed: float) -> None:
        """Changes `pixels` (side, side, 3) in place, by random numbers from `seed` in [0, 1)."""
        draw = np.random.Generator(np.random.Philox(int(seed * 2**53)))
        config, image = self.config, Image.fromarray(pixels)
        if config.auto_augment == "trivial":
            image = self.apply(image, OPERATIONS[draw.integers(len(OPERATIONS))], int(draw.integers(BINS)), 1, draw)
        elif config.auto_augment == "rand":
            for _ in range(config.rand_operations):
                name = OPERATIONS[draw.integers(len(OPERATIONS))]
                image = self.apply(image, name, config.rand_magnitude, 0, draw)
        if any(config.color_jitter):
            image = self._jitter(image, draw)
        pixels[...] = np.asarray(image)
        if draw.random() < config.random_erase:
            _erase(pixels, [round(255 * mean) for mean in config.mean], draw)

    def apply(self, image: Any, name: str, strength: int, column: int, draw: np.random.Generator) -> Any:
        """One operation at a strength of 0 to BINS - 1; `column` is that of the tables above."""
        value = 0.0
        if strongest := SIGNED.get(name) or UNSIGNED.get(name):
            value = strongest[column] * strength / (BINS - 1)
        if name in SIGNED and draw.random() < 0.5:
            value = -value
        if name.startswith("translate") and column == 0:
            value *= image.width
        return self._operation(image, name, value)

    def _operation(self, image: Any, name: str, value: float) -> Any:
        f = self.functions
        if name in ("brightness", "saturation", "contrast", "sharpness"):
            return getattr(f, f"adjust_{name}")(image, 1 + value)
        degrees = math.degrees(math.atan(value))
        operations: dict[str, Callable[[], Any]] = {
            "identity": lambda: image,
            "shear_x": lambda: self._affine(image, [0, 0], [degrees, 0.0]),
            "shear_y": lambda: self._affine(image, [0, 0], [0.0, degrees]),
            "translate_x": lambda: self._affine(image, [int(value), 0], [0.0, 0.0]),
            "translate_y": lambda: self._affine(image, [0, int(value)], [0.0, 0.0]),
            "rotate": lambda: f.rotate(image, value, interpolation=self.bilinear),
            "posterize": lambda: f.posterize(image, 8 - round(value)),
            "solarize": lambda: f.solarize(image, 255 - value),
            "autocontrast": lambda: f.autocontrast(image),
            "equalize": lambda: f.equalize(image),
        }
        return operations[name]()

    def _affine(self, image: Any, translate: list[int], shear: list[float]) -> Any:
        """Shears about the corner, as in the papers; the rest does not depend on the centre."""
        return self.functions.affine(
            image, 0.0, translate, 1.0, shear, interpolation=self.bilinear, center=[0.0, 0.0] if any(shear) else None
        )

    def _jitter(self, image: Any, draw: np.random.Generator) -> Any:
        """Brightness, contrast and saturation by factors in 1 +- x, hue by a shift in +- x, in random order."""
        for index in draw.permutation(4):
            if reach := self.config.color_jitter[index]:
                name = ("brightness", "contrast", "saturation", "hue")[index]
                least, middle = (0.0, 1.0) if name != "hue" else (-0.5, 0.0)
                value = draw.uniform(max(middle - reach, least), middle + reach)
                image = getattr(self.functions, f"adjust_{name}")(image, value)
        return image


def _erase(pixels: Pixels, colour: list[int], draw: np.random.Generator) -> None:
    """Zhong et al., arXiv 1708.04896: a box of 2 to 33 % of the area, here in the mean colour, 0 once normalised."""
    side = len(pixels)
    for _ in range(TRIES):
        area = draw.uniform(*ERASED_AREA) * side**2
        ratio = math.exp(draw.uniform(math.log(ERASED_RATIO[0]), math.log(ERASED_RATIO[1])))
        height, width = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if height < side and width < side:
            top, left = draw.integers(side - height + 1), draw.integers(side - width + 1)
            pixels[top : top + height, left : left + width] = colour
            return


def make_policy(config: Config) -> Policy | None:
    """The policy, or None if no option asks for a change."""
    if config.auto_augment == "none" and not any(config.color_jitter) and not config.random_erase:
        return None
    from torchvision.transforms import InterpolationMode  # imported here: it takes two seconds
    from torchvision.transforms.v2 import functional

    return Policy(config, functional, InterpolationMode.BILINEAR)
