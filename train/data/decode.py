"""Encoded bytes to the pixels of a box, resampled to a square: RGB whatever the file holds."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from train.data.augment import View
from train.data.source import Pixels

Choose = Callable[[int, int], View]
_ORIENTATION = 0x0112


class DecodeError(Exception):
    """The image is damaged or cut short."""


class NotAnImageError(Exception):
    """The bytes are no image at all, whatever the file is called."""


def decode_pil(data: bytes, choose: Choose, side: int) -> tuple[Pixels, View]:
    """Full decode with Pillow, then one antialiased bilinear resampling of the box: (side, side, 3) and the view taken.

    `choose` gets the size as a viewer sees it, after the file's EXIF rotation.

    Raises:
        NotAnImageError: no image format known to Pillow.
        DecodeError: damaged, or cut short.
    """
    if not data:
        raise DecodeError("the file is empty")
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return _resample(_upright_rgb(image), choose, side)
    except UnidentifiedImageError as error:
        raise NotAnImageError(f"not an image: it begins with {data[:16]!r}") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises on bad files
        raise DecodeError(str(error)) from error


def resize_pixels(pixels: Pixels, choose: Choose, side: int) -> tuple[Pixels, View]:
    """The same for pixels (H, W, 3) that need no decoding."""
    return _resample(Image.fromarray(pixels), choose, side)


def _resample(image: Image.Image, choose: Choose, side: int) -> tuple[Pixels, View]:
    view = choose(*image.size)
    left, top, width, height = view.box
    if (width, height) != (side, side) or left % 1 or top % 1:
        image = image.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
    elif image.size != (side, side):
        image = image.crop((int(left), int(top), int(left) + side, int(top) + side))
    return np.asarray(image), view


def _upright_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):  # 16 bits and more: Pillow would clip to white instead of scaling
        deep = np.asarray(image, np.float64)
        image = Image.fromarray((deep / (65535 if deep.max() > 255 else 255) * 255).astype(np.uint8))
    if "exif" in image.info and image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def finish(pixels: Pixels, view: View, out: Pixels) -> None:
    """Applies the view's flip and shift while writing into `out` (side, side, 3); what a shift uncovers is black."""
    if view.flip:
        pixels = pixels[:, ::-1]
    dx, dy = view.shift
    if dx == dy == 0:
        out[...] = pixels
        return
    side = len(out)
    out[...] = 0
    rows, columns = slice(max(dy, 0), side + min(dy, 0)), slice(max(dx, 0), side + min(dx, 0))
    out[rows, columns] = pixels[max(-dy, 0) : side - max(dy, 0), max(-dx, 0) : side - max(dx, 0)]
