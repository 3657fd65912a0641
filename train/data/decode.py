"""Decode images to the RGB pixels of a view, with a decoder that is selected at startup and logged.

Validation images, and all files other than plain upright JPEGs, always use Pillow: full decode, antialiased.
"""

from __future__ import annotations

import abc
import io
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from train.data import reading, roi
from train.data.augment import View
from train.data.source import Data, Pixels
from train.errors import TrainError

Choose = Callable[[int, int], View]
HEAD = 4096  # bytes that usually contain a JPEG's header
SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"BM", b"II*\0", b"MM\0*")  # JPEG, PNG, WebP, BMP, TIFF
ORIENTATION = 0x0112
_APP1, _SCAN = 0xE1, 0xDA
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
FASTER = "about 1.8 times as fast as torchvision's"  # bench.loader, bench.decoders
# exceptions of decoders that do not work on this machine
UNUSABLE = (roi.BuildError, ImportError, OSError, RuntimeError, AttributeError)


class DecodeError(Exception):
    """The image is damaged or truncated."""


class NotAnImageError(Exception):
    """The bytes are not an image, despite the file's name."""


Failure = DecodeError | NotAnImageError


class Wanted(NamedTuple):
    """The arguments of `Decoder.decode`."""

    data: Data
    choose: Choose
    out: Pixels


class Decoder(Protocol):
    """Decodes images; called from several threads concurrently."""

    @property
    def name(self) -> str:
        """The decoder's name for `--decoder`."""

    @property
    def read_at_once(self) -> reading.Read | None:
        """Its function that reads several files, if it has one."""

    def decode(self, data: Data, choose: Choose, out: Pixels) -> None:
        """Write the view that `choose` selects from the image to `out` (side, side, 3).

        `choose` is called with the width and height after the EXIF rotation.

        Raises:
            NotAnImageError: not an image format known to Pillow.
            DecodeError: the image is damaged or truncated.
        """

    def decode_many(self, wanted: Sequence[Wanted]) -> Iterator[Failure | None]:
        """Like `decode` for several images; yield why one cannot be decoded, or None."""

    def resize(self, pixels: Pixels, choose: Choose, out: Pixels) -> None:
        """Like `decode`, for decoded pixels (height, width, 3)."""


class OneByOne(abc.ABC):
    """A decoder that takes one image after the other."""

    read_at_once = None

    @abc.abstractmethod
    def decode(self, data: Data, choose: Choose, out: Pixels) -> None: ...

    def decode_many(self, wanted: Sequence[Wanted]) -> Iterator[Failure | None]:
        for image in wanted:
            try:
                self.decode(*image)
            except (DecodeError, NotAnImageError) as error:
                yield error
            else:
                yield None


class Pillow(OneByOne):
    """Full decode, then antialiased bilinear resampling of the box."""

    name = "pil"

    def decode(self, data: Data, choose: Choose, out: Pixels) -> None:
        image = upright(bytes(data))
        _resample(image, choose(*image.size), out)

    def resize(self, pixels: Pixels, choose: Choose, out: Pixels) -> None:
        _resample(Image.fromarray(pixels), choose(pixels.shape[1], pixels.shape[0]), out)


@dataclass(frozen=True)
class Roi:
    """roi.c for JPEGs: decodes only the crop's rows and columns, resamples like Pillow; Pillow for all other files."""

    library: roi.Library
    name: str = "roi"

    @property
    def read_at_once(self) -> reading.Read:
        return self.library.read

    def decode(self, data: Data, choose: Choose, out: Pixels) -> None:
        for failure in self.decode_many([Wanted(data, choose, out)]):
            if failure:
                raise failure

    def decode_many(self, wanted: Sequence[Wanted]) -> Iterator[Failure | None]:
        plain: list[roi.Encoded | None] = []
        for data, choose, out in wanted:
            size = plain_size(data)
            view = size and choose(*size)
            plain.append(roi.Encoded(data, size, view, _direct(view, out)) if size and view else None)
        found = iter(self.library.decode([image for image in plain if image]))
        for image, whole in zip(plain, wanted, strict=True):
            code, problem = next(found) if image else (roi.UNSUPPORTED, b"")
            if code == roi.UNSUPPORTED:
                yield from Pillow().decode_many([whole])
                continue
            if image and image.out is not whole.out:
                shift(image.out, image.view, whole.out)
            yield DecodeError(problem.decode(errors="replace")) if code == roi.ERROR else None

    def resize(self, pixels: Pixels, choose: Choose, out: Pixels) -> None:
        view = choose(pixels.shape[1], pixels.shape[0])
        resized = _direct(view, out)
        self.library.resample(np.ascontiguousarray(pixels), view, resized)
        if resized is not out:
            shift(resized, view, out)


class TorchVision(OneByOne):
    """torchvision's decoder (libjpeg-turbo, whole image) and torch's antialiased bilinear; Pillow for all other files.

    The trainer requires both anyway, so this is the fastest decoder if nothing can be compiled or installed.
    """

    name = "torchvision"

    def __init__(self) -> None:
        """Decode one pixel as a test, because torchvision may be built without its image library.

        Raises:
            ImportError, OSError, RuntimeError, AttributeError: this torchvision has no image library.
        """
        import torch
        from torchvision import io as images

        self._torch, self._io = torch, images
        pixel = io.BytesIO()
        Image.new("RGB", (1, 1)).save(pixel, "JPEG")
        self._pixels(pixel.getvalue())

    def _pixels(self, data: Data) -> Pixels:
        encoded = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)
        decoded: Pixels = self._io.decode_jpeg(encoded, mode=self._io.ImageReadMode.RGB).permute(1, 2, 0).numpy()
        return decoded

    def decode(self, data: Data, choose: Choose, out: Pixels) -> None:
        if plain_size(data) is None:
            Pillow().decode(data, choose, out)
            return
        try:
            pixels = self._pixels(data)
        except RuntimeError:  # damaged: Pillow gives the reason
            Pillow().decode(data, choose, out)
            return
        self.resize(pixels, choose, out)

    def resize(self, pixels: Pixels, choose: Choose, out: Pixels) -> None:
        view, side = choose(pixels.shape[1], pixels.shape[0]), len(out)
        if not view.inside or any(number % 1 for number in view.box):
            _resample(Image.fromarray(pixels), view, out)
            return
        left, top, width, height = map(int, view.box)
        # copied by numpy: torch would start its own threads in each loader thread
        cut = pixels[top : top + height, left : left + width].copy()
        crop = self._torch.from_numpy(cut).permute(2, 0, 1)[None]
        resized = self._torch.nn.functional.interpolate(crop, (side, side), mode="bilinear", antialias=True)
        finish(resized[0].permute(1, 2, 0).numpy(), view, out)


def choose_decoder(wanted: str, say: Callable[[str], None] = lambda _: None) -> Decoder:
    """Return the decoder for training images: the fastest that works on this machine, or the requested one.

    `say` is called with the reason if `auto` cannot use the compiled decoder.

    Raises:
        TrainError: the requested decoder does not work on this machine.
    """
    tiers: dict[str, Callable[[], Decoder]] = {
        "roi": lambda: Roi(roi.load()),
        "torchvision": TorchVision,
        "pil": Pillow,
    }
    if wanted != "auto":
        try:
            return tiers[wanted]()
        except UNUSABLE as error:
            raise TrainError(
                f"--decoder {wanted}: does not work on this machine: {error}; use --decoder auto"
            ) from error
    for name, make in tiers.items():
        try:
            return make()
        except UNUSABLE as error:
            if name == "roi":
                say(f"train: the compiled decoder, {FASTER}, is not available: {error}")
    raise AssertionError("Pillow always works")


def compared(decoder: str) -> str:
    """Return a decoder's name, and how fast it is."""
    return f"roi ({FASTER})" if decoder == "roi" else f"{decoder} (roi, the compiled one, is {FASTER})"


def upright(data: bytes) -> Image.Image:
    """Decode the complete image to RGB, with its EXIF rotation applied.

    Raises:
        NotAnImageError, DecodeError: see `Decoder`.
    """
    if not any(data[:16]):
        raise DecodeError("the file is filled with zeros" if data else "the file is empty")
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return rgb(image)
    except UnidentifiedImageError as error:
        if data.startswith(SIGNATURES):
            raise DecodeError("its header is damaged") from error
        raise NotAnImageError(f"not an image: it starts with {data[:16]!r}") from error
    except (
        OSError,
        ValueError,
        SyntaxError,
        Image.DecompressionBombError,
    ) as error:  # raised by Pillow for invalid files
        raise DecodeError(str(error)) from error


def _resample(image: Image.Image, view: View, out: Pixels) -> None:
    left, top, width, height = view.box
    if view.inside:
        x, y = int(left), int(top)
        image = image.crop((x, y, math.ceil(left + width), math.ceil(top + height)))
        left, top = left - x, top - y
    box = (left, top, min(left + width, image.width), min(top + height, image.height))  # no rounding error beyond it
    finish(np.asarray(image.resize((len(out), len(out)), Image.Resampling.BILINEAR, box=box)), view, out)


def rgb(image: Image.Image) -> Image.Image:
    """Return an image of 8 bits a channel, with its EXIF rotation applied."""
    if image.mode.startswith(("I", "F")):  # 16-bit integers, or floats from 0 to 1: Pillow would clip, not scale
        brightest = 1.0 if image.mode.startswith("F") else 65535.0
        share = np.asarray(image, np.float64) / brightest
        image = Image.fromarray((share.clip(0, 1) * 255).astype(np.uint8))
    if "exif" in image.info and image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _direct(view: View, out: Pixels) -> Pixels:
    """Return where C code may write the view's box: `out`, or a buffer if it is not contiguous or will be shifted."""
    return out if view.shift == (0, 0) and out.flags.c_contiguous else np.empty(out.shape, np.uint8)


def finish(pixels: Pixels, view: View, out: Pixels) -> None:
    """Write pixels to `out` (side, side, 3) with the view's flip and shift."""
    shift(pixels[:, ::-1] if view.flip else pixels, view, out)


def shift(pixels: Pixels, view: View, out: Pixels) -> None:
    """Write pixels to `out` (side, side, 3), shifted and filled with black."""
    dx, dy = view.shift
    if dx == dy == 0:
        out[...] = pixels
        return
    side = len(out)
    out[...] = 0
    rows, columns = slice(max(dy, 0), side + min(dy, 0)), slice(max(dx, 0), side + min(dx, 0))
    out[rows, columns] = pixels[max(-dy, 0) : side - max(dy, 0), max(-dx, 0) : side - max(dx, 0)]


def plain_size(data: Data) -> tuple[int, int] | None:
    """Return width and height of a JPEG, grey or YCbCr, not rotated by EXIF, of a size that Pillow accepts; else None.

    ITU-T T.81, annex B; EXIF 2.32, 4.5 and 4.6.

    Pillow reads or rejects all other files, and damaged ones. A wrong None only costs time.
    """
    found = _plain_size(bytes(data[:HEAD]))
    return _plain_size(bytes(data)) if found is None and len(data) > HEAD else found


def _plain_size(data: bytes) -> tuple[int, int] | None:
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    position, size = 2, None
    try:
        while data[position] == 0xFF:
            marker, start = data[position + 1], position + 4
            end = position + 2 + (data[position + 2] << 8 | data[position + 3])
            if marker == _APP1 and data.startswith(b"Exif\0\0", start) and _orientation(data, start + 6, end) != 1:
                return None
            if marker in _FRAMES:
                _, height, width, channels = struct.unpack_from(">BHHB", data, start)
                limit = Image.MAX_IMAGE_PIXELS
                if channels not in (1, 3) or (limit and width * height > 2 * limit):  # Pillow rejects larger images
                    return None
                size = (width, height) if width and height else None
            if marker == _SCAN:
                return size
            position = end
    except (struct.error, IndexError):
        pass
    return None


def _orientation(data: bytes, start: int, end: int) -> int:
    """Return the EXIF orientation, by default 1; `data[start:end]` is a TIFF header with its directories."""
    order = "<" if data[start : start + 2] == b"II" else ">"
    (directory,) = struct.unpack_from(f"{order}I", data, start + 4)
    (entries,) = struct.unpack_from(f"{order}H", data, start + directory)
    for position in range(start + directory + 2, min(start + directory + 2 + 12 * entries, end), 12):
        tag, _, _, value = struct.unpack_from(f"{order}HHIH", data, position)
        if tag == ORIENTATION:
            return int(value)
    return 1
