"""Random crops of JPEGs: how close each decoder comes to Pillow's pixels, and its images per CPU second.

    pip install torchcodec nvidia-dali-cuda120    # optional: what is not installed is left out
    python -m bench.decoders [--photos 200] [--large 8] [--rounds 5] [--json FILE]

The photos are parts of the two that scikit-learn ships, at 500 x 375 and, tiled without enlargement, at 12 megapixels;
quality 90. Each decoder gets the same crops (`--augment crop`). They are compared with Pillow's crop followed by its
antialiased BILINEAR resize. All run in this process, in turns, starting with another one each round; a rate is the
median over rounds of images per second of processor time, threads included.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from bench import report
from train.data import augment, decode
from train.errors import TrainError

Pixels = NDArray[np.uint8]
Box = tuple[int, int, int, int]  # left, top, width, height
BATCH = 32  # of DALI, which decodes batches


@dataclass(frozen=True)
class Crop:
    """A JPEG and the part of it that is wanted."""

    data: bytes
    box: Box


Crops = Callable[[Sequence[Crop], int], Iterator[Pixels]]  # yields (side, side, 3) for each crop, in order


def photos(count: int, size: tuple[int, int]) -> Iterator[bytes]:
    """JPEGs of this width and height."""
    from sklearn.datasets import load_sample_images

    originals = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    rng, (width, height) = np.random.default_rng(0), size
    for index in range(count):
        photo = originals[index % len(originals)]
        if width > photo.width:  # tiled with mirrored copies: enlarged photos would have no detail
            tile = np.asarray(photo)
            tile = np.concatenate([tile, tile[:, ::-1]], axis=1)
            tile = np.concatenate([tile, tile[::-1]])
            left, top = rng.integers(photo.width), rng.integers(photo.height)
            wide = np.tile(tile, (2 + height // len(tile), 2 + width // tile.shape[1], 1))
            photo = Image.fromarray(wide[top : top + height, left : left + width])
        else:
            part = rng.uniform(0.5, 1) * min(photo.width / width, photo.height / height)
            w, h = int(width * part), int(height * part)
            left, top = rng.integers(photo.width - w + 1), rng.integers(photo.height - h + 1)
            photo = photo.resize(size, Image.Resampling.BICUBIC, box=(left, top, left + w, top + h))
        out = io.BytesIO()
        photo.save(out, "JPEG", quality=90)
        yield out.getvalue()


def crops_of(count: int, size: tuple[int, int]) -> list[Crop]:
    """One random crop per photo, as the trainer draws them."""
    numbers = np.random.default_rng(1).random((count, augment.NUMBERS)).tolist()
    return [
        Crop(data, tuple(map(int, augment.random_box(*size, 0.08, row))))  # type: ignore[arg-type]
        for data, row in zip(photos(count, size), numbers, strict=True)
    ]


def pillow(crops: Sequence[Crop], side: int) -> Iterator[Pixels]:
    """The reference."""
    for crop in crops:
        left, top, width, height = crop.box
        image = Image.open(io.BytesIO(crop.data)).crop((left, top, left + width, top + height))
        yield np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))


def ours(name: str) -> Crops:
    """A decoder of the trainer.

    Raises:
        TrainError: it does not work on this machine.
    """
    decoder = decode.choose_decoder(name)

    def run(crops: Sequence[Crop], side: int) -> Iterator[Pixels]:
        for crop in crops:
            view, out = augment.View(crop.box), np.empty((side, side, 3), np.uint8)
            decoder.decode(crop.data, lambda *_, view=view: view, out)  # type: ignore[misc]
            yield out

    return run


def v2(load: Callable[[torch.Tensor], torch.Tensor]) -> Crops:
    """A decoder of tensors, then torchvision's v2 transform."""
    from torchvision.transforms.v2 import functional

    def run(crops: Sequence[Crop], side: int) -> Iterator[Pixels]:
        for crop in crops:
            left, top, width, height = crop.box
            image = load(torch.frombuffer(bytearray(crop.data), dtype=torch.uint8))
            image = functional.resized_crop(image, top, left, height, width, [side, side], antialias=True)
            yield image.permute(1, 2, 0).numpy()

    return run


def torchvision() -> Crops:
    """Its own decoder."""
    from torchvision import io as images

    return v2(lambda data: images.decode_jpeg(data, mode=images.ImageReadMode.RGB))


def torchcodec() -> Crops:
    """Its decoder of images."""
    from torchcodec.decoders import decode_image

    return v2(decode_image)


def dali() -> Crops:
    """DALI on the CPU, in batches: decodes only the crop."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=2, device_id=None, prefetch_queue_depth=1)
    def pipeline(side: int) -> Any:
        data, start, shape = (fn.external_source(name=name) for name in ("data", "start", "shape"))
        part = fn.decoders.image_slice(
            data, start, shape, normalized_anchor=False, normalized_shape=False, output_type=types.RGB
        )
        return fn.resize(part, size=(side, side))

    built: dict[int, Any] = {}

    def run(crops: Sequence[Crop], side: int) -> Iterator[Pixels]:
        if side not in built:
            built[side] = pipeline(side)
            built[side].build()
        for batch in (crops[start : start + BATCH] for start in range(0, len(crops), BATCH)):
            built[side].feed_input("data", [np.frombuffer(crop.data, np.uint8) for crop in batch])
            built[side].feed_input("start", [np.array(crop.box[:2], np.float32) for crop in batch])
            built[side].feed_input("shape", [np.array(crop.box[2:], np.float32) for crop in batch])
            (images,) = built[side].run()
            yield from (np.asarray(images.at(index)) for index in range(len(batch)))

    return run


DECODERS: dict[str, Callable[[], Crops]] = {
    "ours, roi (the default)": lambda: ours("roi"),
    "ours, torchvision": lambda: ours("torchvision"),
    "ours, pil": lambda: ours("pil"),
    "Pillow": lambda: pillow,
    "torchvision: decode_jpeg, v2": torchvision,
    "torchcodec: decode_image, v2": torchcodec,
    f"DALI on the CPU, batches of {BATCH}": dali,
}


def psnr(ours: Pixels, theirs: Pixels) -> float:
    """In dB; infinite for equal pixels."""
    error = float(((ours.astype(float) - theirs) ** 2).mean())
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))


def rates(decoders: dict[str, Crops], crops: Sequence[Crop], side: int, rounds: int) -> dict[str, list[float]]:
    """Images per CPU second of each decoder, one number a round."""
    names, found = list(decoders), {name: list[float]() for name in decoders}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            before = time.process_time()
            for _ in decoders[name](crops, side):
                pass
            found[name].append(len(crops) / (time.process_time() - before))
    return found


def main() -> None:
    """Prints a table per size, and writes them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=200, help="of 500 x 375 pixels")
    parser.add_argument("--large", type=int, default=8, help="of 12 megapixels")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    decoders: dict[str, Crops] = {}
    for name, make in DECODERS.items():
        try:
            decoders[name] = make()
        except (ImportError, OSError, RuntimeError, TrainError) as error:
            print(f"skipped {name}: {error}")
    result: dict[str, Any] = report.machine() | {"torch": torch.__version__, "rounds": options.rounds, "tables": []}
    for size, count, side in (
        ((500, 375), options.photos, 224),
        ((500, 375), options.photos, 112),
        ((4000, 3000), options.large, 224),
    ):
        crops = crops_of(count, size)
        expected = [pixels.copy() for pixels in pillow(crops, side)]
        speed = rates(decoders, crops, side, options.rounds)
        rows: list[dict[str, Any]] = []
        for name, run in decoders.items():
            quality = [psnr(*pair) for pair in zip(run(crops, side), expected, strict=True)]
            low, five, middle = (float(np.percentile(quality, part, method="lower")) for part in (0, 5, 50))
            rate = report.summary(speed[name])
            rows.append({"decoder": name, "median": middle, "5 %": five, "minimum": low, "images_per_cpu_s": rate})
        result["tables"].append({"size": size, "side": side, "crops": count, "rows": rows})
        table = [[f"{size[0]} x {size[1]} to {side} px", "dB median", "5 %", "minimum", "images/CPU-s", "min", "max"]]
        for row in rows:
            decibels = [f"{row[key]:.1f}" for key in ("median", "5 %", "minimum")]
            rate = row["images_per_cpu_s"]
            table.append([row["decoder"], *decibels, *(f"{rate[key]:.0f}" for key in ("median", "min", "max"))])
        print(f"\n{report.table(table)}", flush=True)
    if options.json:
        report.write(options.json, result)


if __name__ == "__main__":
    main()
