"""Encoded bytes to the pixels of a view, RGB whatever the file holds; the decoder is chosen at start-up and named.

Validation and whatever is no plain upright JPEG always go through Pillow: full decode, antialiased.
"""

from __future__ import annotations

import importlib.util
import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from train.data import roi
from train.data.augment import View
from train.data.source import Pixels
from train.errors import TrainError

Choose = Callable[[int, int], View]
_ORIENTATION = 0x0112


class DecodeError(Exception):
    """The image is damaged or cut short."""


class NotAnImageError(Exception):
    """The bytes are no image at all, whatever the file is called."""


class Decoder(Protocol):
    """Called from several threads at once."""

    @property
    def name(self) -> str:
        """As `--decoder` spells it."""

    def decode(self, data: bytes, choose: Choose, out: Pixels) -> None:
        """Writes the view that `choose` takes of the image into `out` (side, side, 3).

        `choose` gets the size as a viewer sees it, after the file's EXIF rotation.

        Raises:
            NotAnImageError: no image format known to Pillow.
            DecodeError: damaged, or cut short.
        """

    def resize(self, pixels: Pixels, choose: Choose, out: Pixels) -> None:
        """The same for pixels (height, width, 3) that need no decoding."""


class Pillow:
    """Full decode, then one antialiased bilinear resampling of the box."""

    name = "pil"

    def decode(self, data: bytes, choose: Choose, out: Pixels) -> None:
        """See `Decoder`."""
        _resample(upright(data), choose, out)

    def resize(self, pixels: Pixels, choose: Choose, out: Pixels) -> None:
        """See `Decoder`."""
        _resample(Image.fromarray(pixels), choose, out)


@dataclass(frozen=True)
class Roi:
    """roi.c for JPEGs: only the crop's rows and columns, two-tap bilinear; Pillow for the rest."""

    library: roi.Library
    name: str = "roi"

    def decode(self, data: bytes, choose: Choose, out: Pixels) -> None:
        """See `Decoder`."""
        size = self.library.size(data) if _is_upright_jpeg(data) else None
        if size is None:
            Pillow().decode(data, choose, out)
            return
        view = choose(*size)
        direct = view.shift == (0, 0) and out.flags.c_contiguous
        pixels = out if direct else roi.contiguous(len(out))
        if problem := self.library.decode(data, view, direct and view.flip, pixels):
            raise DecodeError(problem)
        if not direct:
            finish(pixels, view, out)

    def resize(self, pixels: Pixels, choose: Choose, out: Pixels) -> None:
        """See `Decoder`."""
        view = choose(pixels.shape[1], pixels.shape[0])
        if view.shift != (0, 0) or view.reduction(len(out)) >= 2:  # two taps would alias
            _resample(Image.fromarray(pixels), lambda *_: view, out)
        else:
            self.library.resample(np.ascontiguousarray(pixels), view, out)


class SimpleJpeg:
    """simplejpeg (libjpeg-turbo, whole image) and OpenCV's bilinear, where both are installed; Pillow for the rest."""

    name = "simplejpeg"

    def __init__(self) -> None:
        import cv2
        import simplejpeg

        cv2.setNumThreads(0)  # the loader's threads are enough
        self._jpeg, self._cv = simplejpeg, cv2

    def decode(self, data: bytes, choose: Choose, out: Pixels) -> None:
        """See `Decoder`."""
        if not _is_upright_jpeg(data):
            Pillow().decode(data, choose, out)
            return
        try:
            pixels = self._jpeg.decode_jpeg(data, "RGB", strict=False)
        except ValueError:  # CMYK, or damaged: Pillow knows which, and says so
            Pillow().decode(data, choose, out)
            return
        self.resize(pixels, choose, out)

    def resize(self, pixels: Pixels, choose: Choose, out: Pixels) -> None:
        """See `Decoder`."""
        view, side = choose(pixels.shape[1], pixels.shape[0]), len(out)
        left, top = int(view.box[0]), int(view.box[1])
        right, bottom = round(view.box[0] + view.box[2]), round(view.box[1] + view.box[3])
        finish(self._cv.resize(pixels[top:bottom, left:right], (side, side)), view, out)


def choose_decoder(wanted: str) -> Decoder:
    """The decoder for training images: the fastest one that works here, or the one asked for.

    Raises:
        TrainError: the one asked for does not work here.
    """
    if wanted in ("auto", "roi"):
        try:
            return Roi(roi.Library(roi.build()))
        except roi.BuildError as error:
            if wanted == "roi":
                raise TrainError(f"--decoder roi: it cannot be built here: {error}; use --decoder auto") from error
    if wanted in ("auto", "simplejpeg"):
        missing = [name for name in ("simplejpeg", "cv2") if importlib.util.find_spec(name) is None]
        if not missing:
            return SimpleJpeg()
        if wanted == "simplejpeg":
            raise TrainError(f"--decoder simplejpeg: {' and '.join(missing)} not installed; use --decoder auto")
    return Pillow()


def upright(data: bytes) -> Image.Image:
    """The whole image, RGB, as a viewer shows it.

    Raises:
        NotAnImageError, DecodeError: see `Decoder`.
    """
    if not data:
        raise DecodeError("the file is empty")
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return _upright_rgb(image)
    except UnidentifiedImageError as error:
        raise NotAnImageError(f"not an image: it begins with {data[:16]!r}") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's, on bad files
        raise DecodeError(str(error)) from error


def _resample(image: Image.Image, choose: Choose, out: Pixels) -> None:
    view, side = choose(*image.size), len(out)
    left, top, width, height = view.box
    if (width, height) != (side, side) or left % 1 or top % 1:
        image = image.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))
    elif image.size != (side, side):
        image = image.crop((int(left), int(top), int(left) + side, int(top) + side))
    finish(np.asarray(image), view, out)


def _upright_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith(("I", "F")):  # 16 bits and more: Pillow would clip to white instead of scaling
        deep = np.asarray(image, np.float64)
        image = Image.fromarray((deep / (65535 if deep.max() > 255 else 255) * 255).astype(np.uint8))
    if "exif" in image.info and image.getexif().get(_ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _is_upright_jpeg(data: bytes) -> bool:
    """A JPEG whose EXIF says nothing of a rotation. A false alarm costs time only: Pillow reads it then."""
    if not data.startswith(b"\xff\xd8\xff"):
        return False
    start = data.find(b"Exif\0\0", 0, 256) + 6
    if start < 6:
        return True
    order = "<" if data[start : start + 2] == b"II" else ">"
    try:
        (directory,) = struct.unpack_from(f"{order}I", data, start + 4)
        (entries,) = struct.unpack_from(f"{order}H", data, start + directory)
        for entry in range(entries):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", data, start + directory + 2 + 12 * entry)
            if tag == _ORIENTATION:
                return bool(value == 1)
    except struct.error:
        return False
    return True


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
