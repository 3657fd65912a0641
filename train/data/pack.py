"""Pack a data set into one file, with images resized to a maximum side or stored as raw pixels."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from train.arguments import Parser
from train.data.decode import DecodeError, NotAnImageError, upright
from train.data.open import open_dataset
from train.data.packed import PackWriter
from train.data.source import Pixels, Source
from train.errors import TrainError

AHEAD = 64  # images in flight: enough for any number of threads, with little memory


def main(argv: list[str]) -> int:
    """Run the command `python -m train pack` and print the resulting size.

    Raises:
        TrainError: the data set cannot be read.
    """
    parser = Parser(prog="python -m train pack", description=__doc__)
    parser.add_argument("data", help="data set, as for --data of the trainer")
    parser.add_argument("out", type=Path, help="output file")
    parser.add_argument(
        "--max-side", type=int, default=400, help="maximum side of JPEG images in pixels (default: 400)"
    )
    parser.add_argument("--quality", type=int, default=90, help="JPEG quality of resized images (default: 90)")
    parser.add_argument(
        "--raw", type=int, metavar="SIDE", help="store raw pixels instead of JPEG, with shorter side SIDE"
    )
    options = parser.parse_args(argv)
    dataset = open_dataset(options.data)
    recode = Recode(options.max_side, options.quality, options.raw)
    with PackWriter(options.out, dataset.classes) as writer, ThreadPoolExecutor(_cores()) as pool:
        for split, source in (("train", dataset.train), ("val", dataset.val)):
            writer.add(split, _records(source, recode, pool))
    images = len(dataset.train.labels) + len(dataset.val.labels)
    size = options.out.stat().st_size
    sys.stdout.write(
        f"{options.out}: {images:,} images, {size / 1e6:,.1f} MB, {size / images / 1e3:.1f} kB per image\n"
    )
    return 0


class Recode:
    """Re-encodes one image."""

    def __init__(self, max_side: int, quality: int, raw: int | None) -> None:
        self._max_side, self._quality, self._raw = max_side, quality, raw

    def __call__(self, data: bytes | Pixels) -> bytes | Pixels:
        """Return a JPEG, or raw pixels (height, width, 3). A JPEG that is small enough is kept unchanged."""
        image = Image.fromarray(data) if isinstance(data, np.ndarray) else upright(data)
        if self._raw:
            return np.asarray(_scaled(image, self._raw / min(image.size)))
        small = max(image.size) <= self._max_side
        if small and isinstance(data, bytes) and data.startswith(b"\xff\xd8\xff"):
            return data
        out = io.BytesIO()
        _scaled(image, min(self._max_side / max(image.size), 1.0)).save(out, "JPEG", quality=self._quality)
        return out.getvalue()


def _scaled(image: Image.Image, factor: float) -> Image.Image:
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)


def _records(source: Source, recode: Recode, pool: ThreadPoolExecutor) -> Iterator[tuple[str, int, bytes | Pixels]]:
    def one(index: int) -> tuple[str, int, bytes | Pixels]:
        try:
            name = source.files[index] if source.files else source.name(index)
            return name, int(source.labels[index]), recode(source.read(index))
        except (DecodeError, NotAnImageError, OSError) as error:
            raise TrainError(f"{source.name(index)}: {error}; repair or remove it") from error

    waiting: Iterator[Future[tuple[str, int, bytes | Pixels]]] = (
        pool.submit(one, index) for index in range(len(source.labels))
    )
    ahead = list(islice(waiting, AHEAD))
    while ahead:
        yield ahead.pop(0).result()
        ahead.extend(islice(waiting, 1))


def _cores() -> int:
    return len(os.sched_getaffinity(0))
