"""Changes of a batch of training images on its device (`--augment-on device`).

Each operation is computed once for all its images, with a value per image, like torchvision's functions for a single
tensor. The random numbers are the same as on the CPU, so that images differ only in rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from train.config import Config
from train.data.augment import Changes, enabled, erased_colour

WHITE = 255.0
# red, green and blue in each sextant of the hue circle, as indices into (value, p, q, t)
SEXTANTS = (0, 2, 1, 1, 3, 0), (3, 0, 0, 2, 1, 1), (1, 1, 3, 0, 0, 2)


@dataclass(frozen=True)
class DevicePolicy:
    """Computes changes that are drawn by the loader."""

    config: Config
    functions: Any  # torchvision.transforms.v2.functional

    def __call__(self, images: Tensor, changes: Sequence[Changes]) -> Tensor:
        """Return new images, (n, side, side, 3) uint8 like `images`, without waiting for the device."""
        planes = images.permute(0, 3, 1, 2).contiguous()
        for step in range(max((len(each.operations) for each in changes), default=0)):
            chosen: dict[str, list[tuple[int, float]]] = {}
            for index, each in enumerate(changes):
                if step < len(each.operations) and (operation := each.operations[step]).name != "identity":
                    chosen.setdefault(operation.name, []).append((index, operation.value))
            for name, pairs in chosen.items():
                where = _on(planes, [index for index, _ in pairs], torch.int64)
                planes[where] = self.apply(planes[where], name, [value for _, value in pairs])
        self._erase(planes, changes)
        return planes.permute(0, 2, 3, 1).contiguous()

    def apply(self, images: Tensor, name: str, values: Sequence[float]) -> Tensor:
        """Apply the operation `name` to images (n, 3, side, side) uint8, with a value per image as in `Operation`."""
        if name in ("autocontrast", "equalize"):
            changed: Tensor = getattr(self.functions, name)(images)
            return changed
        if name == "rotate" or name.startswith(("shear", "translate")):
            return _warped(images, [_inverse(name, value, images.shape[-1]) for value in values])
        if name == "posterize":  # value: number of bits to keep
            return images & _on(images, [256 - (1 << (8 - int(value))) for value in values], torch.uint8)
        each = _on(images, values, torch.float32)
        if name == "solarize":
            return torch.where(images >= each, 255 - images, images)
        if name == "hue":
            return _hue(images, each)
        if name == "brightness":
            return images.mul(each).clamp_(0, WHITE).to(torch.uint8)
        rest = _on(images, [1.0 - value for value in values], torch.float32)
        if name == "sharpness":
            return _sharper(images, rest)
        grey = self.functions.rgb_to_grayscale(images).to(torch.float32)
        if name == "contrast":
            grey = grey.mean((1, 2, 3), keepdim=True)
        return torch.addcmul(images.mul(each), grey, rest).clamp_(0, WHITE).to(torch.uint8)

    def _erase(self, planes: Tensor, changes: Sequence[Changes]) -> None:
        boxes = [(index, each.box) for index, each in enumerate(changes) if each.box]
        if not boxes:
            return
        where = _on(planes, [index for index, _ in boxes], torch.int64)
        top, left, height, width = (_on(planes, [box[i] for _, box in boxes], torch.int32) for i in range(4))
        pixel = torch.arange(planes.shape[-1], device=planes.device)
        rows, columns = pixel.view(1, 1, -1, 1), pixel.view(1, 1, 1, -1)
        inside = (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)
        colour = _on(planes, erased_colour(self.config), torch.uint8).view(1, 3, 1, 1)
        planes[where] = torch.where(inside, colour, planes[where])


def _on(like: Tensor, values: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return the values on the device of `like`: (n,) for int64 indices, else (n, 1, 1, 1).

    Not in pinned memory: CUDA copies up to 64 KiB without waiting for the device ("API synchronization behavior").
    """
    copied = torch.tensor(values, dtype=dtype).to(like.device, non_blocking=True)
    return copied if dtype is torch.int64 else copied.view(-1, 1, 1, 1)


def _sharper(images: Tensor, rest: Tensor) -> Tensor:
    """Blend with a 3x3 mean in which the centre counts 5 times; edge pixels are unchanged."""
    if images.shape[-1] <= 2:
        return images
    a, b = 1.0 / 13.0, 5.0 / 13.0
    kernel = _on(images, (a, a, a, a, b, a, a, a, a), torch.float32).view(1, 1, 3, 3)
    out = images.to(torch.float32)
    smooth = functional.conv2d(out, kernel.expand(3, -1, -1, -1), groups=3).round_()
    inner = out[..., 1:-1, 1:-1]
    inner.copy_(torch.addcmul(inner, smooth.sub_(inner), rest))
    return out.clamp_(0, WHITE).to(torch.uint8)


def _hue(images: Tensor, shift: Tensor) -> Tensor:
    """Shift the hue in the HSV model by a fraction of the circle."""
    scaled = images.to(torch.float32).mul_(1.0 / WHITE)
    r, g, b = scaled.unbind(1)
    low, high = torch.aminmax(scaled, dim=1)
    span = high - low
    grey = span == 0
    divisor = torch.where(grey, 1.0, span)
    rc, gc, bc = ((high - each) / divisor for each in (r, g, b))
    hue = torch.where(high == r, bc - gc, torch.where(high == g, rc + 2.0 - bc, gc + 4.0 - rc))
    hue = (hue * (1.0 / 6.0) + 1.0).fmod_(1.0).add_(shift.view(-1, 1, 1)).remainder_(1.0)
    saturation = span / torch.where(grey, 1.0, high)
    sixth = hue * 6
    part = sixth.floor()
    toward = saturation * (sixth - part)
    pale = 1.0 - saturation
    p, q, t = ((each * high).clamp_(0.0, 1.0) for each in (pale, 1.0 - toward, toward + pale))
    sextants = _on(images, [index for row in SEXTANTS for index in row], torch.int64).view(3, 6)
    chosen = sextants[:, part.to(torch.int64).remainder_(6)].transpose(0, 1)
    return torch.stack((high, p, q, t), 1).gather(1, chosen).mul_(WHITE + 1.0 - 1e-3).to(torch.uint8)


def _inverse(name: str, value: float, side: int) -> tuple[float, ...]:
    """Return the inverse affine map, relative to the centre: ax + by + c and dx + ey + f; shears keep the corner."""
    slope = math.tan(math.radians(value))
    cosine, sine = math.cos(math.radians(value)), math.sin(math.radians(value))
    return {
        "shear_x": (1.0, slope, slope * side / 2, 0.0, 1.0, 0.0),
        "shear_y": (1.0, 0.0, 0.0, slope, 1.0, slope * side / 2),
        "translate_x": (1.0, 0.0, -value, 0.0, 1.0, 0.0),
        "translate_y": (1.0, 0.0, 0.0, 0.0, 1.0, -value),
        "rotate": (cosine, -sine, 0.0, sine, cosine, 0.0),
    }[name]


def _warped(images: Tensor, matrices: Sequence[tuple[float, ...]]) -> Tensor:
    """Apply inverse affine maps, with bilinear interpolation and black outside."""
    count, _, _, side = images.shape
    numbers = [number for matrix in matrices for number in matrix]
    matrix = _on(images, numbers, torch.float32).view(count, 2, 3).transpose(1, 2) / (0.5 * side)
    at = torch.linspace((1.0 - side) / 2, (side - 1.0) / 2, side, device=images.device)
    x, y = at.expand(side, side), at.view(-1, 1).expand(side, side)
    points = torch.stack((x, y, torch.ones_like(x)), 2).view(1, -1, 3)
    grid = points.expand(count, -1, -1).bmm(matrix).view(count, side, side, 2)
    moved = functional.grid_sample(images.to(torch.float32), grid, mode="bilinear", align_corners=False)
    return moved.round_().to(torch.uint8)


def make_device_policy(config: Config) -> DevicePolicy | None:
    """Return the policy, or None if no option enables a change on the device."""
    if config.augment_on == "cpu" or not enabled(config):
        return None
    from torchvision.transforms.v2 import functional as functions  # imported here: it takes two seconds

    return DevicePolicy(config, functions)
