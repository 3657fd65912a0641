"""Changes of one training image on the CPU: with torchvision's functions on Pillow images, and the user's own.

On the CPU, tensors take twice the time (11 operations at 176 px: 5.4 instead of 2.5 ms on average).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from train.config import Config
from train.data.augment import JITTER, Changes, Operation, draw, enabled, erased_colour
from train.data.source import Pixels
from train.own import Function, called, described, is_own, own, unfit


@dataclass(frozen=True)
class Policy:
    """Draws and computes the changes that the options enable."""

    config: Config
    functions: Any  # torchvision.transforms.v2.functional
    bilinear: Any

    def __call__(self, pixels: Pixels, seed: float) -> None:
        """Change `pixels` (side, side, 3) in place, with random numbers from `seed` in [0, 1)."""
        self.change(pixels, draw(self.config, seed, len(pixels)))

    def change(self, pixels: Pixels, changes: Changes) -> None:
        """Change `pixels` (side, side, 3) in place."""
        image = Image.fromarray(pixels)
        for operation in changes.operations:
            image = self.apply(image, operation)
        pixels[...] = np.asarray(image)
        if changes.box:
            top, left, height, width = changes.box
            pixels[top : top + height, left : left + width] = erased_colour(self.config)

    def apply(self, image: Any, operation: Operation) -> Any:
        """Return the image after one operation."""
        f, value = self.functions, operation.value
        if operation.name in (*JITTER, "sharpness"):
            return getattr(f, f"adjust_{operation.name}")(image, value)
        operations: dict[str, Callable[[], Any]] = {
            "identity": lambda: image,
            "shear_x": lambda: self._affine(image, [0, 0], [value, 0.0]),
            "shear_y": lambda: self._affine(image, [0, 0], [0.0, value]),
            "translate_x": lambda: self._affine(image, [value, 0], [0.0, 0.0]),
            "translate_y": lambda: self._affine(image, [0, value], [0.0, 0.0]),
            "rotate": lambda: f.rotate(image, value, interpolation=self.bilinear),
            "posterize": lambda: f.posterize(image, value),
            "solarize": lambda: f.solarize(image, value),
            "autocontrast": lambda: f.autocontrast(image),
            "equalize": lambda: f.equalize(image),
        }
        return operations[operation.name]()

    def _affine(self, image: Any, translate: list[float], shear: list[float]) -> Any:
        """Shear about the corner, as in the papers; translations do not depend on the centre."""
        return self.functions.affine(
            image, 0.0, translate, 1.0, shear, interpolation=self.bilinear, center=[0.0, 0.0] if any(shear) else None
        )


def make_policy(config: Config) -> Policy | None:
    """Return the policy, or None if no option enables a change on the CPU."""
    if config.augment_on == "device" or not enabled(config):
        return None
    from torchvision.transforms import InterpolationMode  # imported here: it takes two seconds
    from torchvision.transforms.v2 import functional

    return Policy(config, functional, InterpolationMode.BILINEAR)


@dataclass(frozen=True)
class OwnChange:
    """The function of --augment MODULE:FUNCTION."""

    text: str
    function: Function

    def __call__(self, pixels: Pixels, seed: float) -> None:
        """Change `pixels` (side, side, 3) in place. Raises TrainError if the function fails; `seed`: in [0, 1)."""
        found = called("augment", self.text, self.function, pixels, int(seed * 2**32))
        if not (isinstance(found, np.ndarray) and found.dtype == np.uint8 and found.shape == pixels.shape):
            raise unfit("augment", self.text, f"{described(found)} for an image of shape {pixels.shape}")
        pixels[...] = found


def make_own_change(config: Config) -> OwnChange | None:
    """Return the user's change, if there is one. Raises TrainError: see `own`."""
    return OwnChange(config.augment, own("augment", config.augment)) if is_own(config.augment) else None


def try_own_change(change: OwnChange, side: int) -> str:
    """Time the user's change; return the line that says what it costs.

    Raises:
        TrainError: it fails, or returns another image when it is called again.
    """
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    seconds, results = [], []
    for _ in range(3):
        image, began = noise.copy(), time.perf_counter()
        change(image, 0.5)
        seconds.append(time.perf_counter() - began)
        results.append(image)
    if not np.array_equal(results[1], results[2]):  # the first call may set up something
        raise unfit("augment", change.text, "another image for the same one and the same seed")
    return (
        f"train: --augment {change.text}: {1000 * min(seconds):.2g} ms of Python an image: at most "
        f"{1 / min(seconds):,.0f} images/s a process"
    )
