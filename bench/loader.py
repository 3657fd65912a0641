"""Files to batches: images per CPU-second of our loader against what a user would write instead, in one run.

    python -m bench.loader [--images 256] [--rounds 9] [--json FILE]

ImageNet-sized JPEGs (made here from two real photos), RandomResizedCrop to 224, batches of 64, two workers each. All
take turns, a pass over the images each; a ratio is the median of the rounds' own ratios, so that what else the machine
does meets both sides of it. CPU-seconds are of this process and its workers. PSNR is of the same crops against Pillow
on the original files; `decode` is what a packed file's re-encoding cost before.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from bench import report
from bench.loader_peers import BATCH, PEERS, SIDE, WORKERS, Box, Loaded, classic
from train.config import Config
from train.data import augment, decode, pack, sampler
from train.data.loader import Loader, Request
from train.data.open import open_dataset
from train.data.source import Source
from train.errors import TrainError

SIZES = ((500, 375), (375, 500), (500, 333), (333, 500), (500, 500), (640, 480), (400, 300), (480, 360))
CROPS = 32  # images whose PSNR is taken

CLASSIC = "torchvision classic (PIL, float32)"
COMPILED, WITHOUT, BARE = "ours, compiled", "ours, simplejpeg + OpenCV", "ours, torchvision"
PACKED = "ours, compiled, packed JPEG <= 400 px"
TARGETS = (
    (COMPILED, CLASSIC, 3.5),
    (WITHOUT, CLASSIC, 2.5),
    (BARE, CLASSIC, 2.5),
    (PACKED, CLASSIC, 7.0),
    (COMPILED, "torchvision uint8 (decode_jpeg, v2)", 1.3),
    (COMPILED, "timm (uint8, fast_collate)", 1.3),
    (COMPILED, "DALI on CPU (fused crop)", 1.3),
)


@dataclass
class Row:
    """One contestant's rounds."""

    loaded: Loaded
    psnr: float | None
    per_cpu_s: list[float] = field(default_factory=list)  # images
    per_s: list[float] = field(default_factory=list)


def make_images(folder: Path, count: int) -> None:
    """`count` JPEGs, quality 95, three of four 4:2:0: crops of two photos, enlarged and shaded differently."""
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    rng = np.random.default_rng(0)
    for index in range(count):
        photo, size = photos[index % 2], SIZES[index % len(SIZES)]
        zoom = rng.uniform(0.5, 1.0)
        w, h = int(photo.width * zoom), int(photo.height * zoom)
        x, y = int(rng.integers(photo.width - w + 1)), int(rng.integers(photo.height - h + 1))
        picture = photo.resize(size, Image.Resampling.BICUBIC, box=(x, y, x + w, y + h))
        gain = rng.uniform(0.8, 1.2)
        picture = picture.point([min(int(value * gain), 255) for value in range(256)] * 3)
        for split in ("train", "val") if index < 8 else ("train",):
            path = folder / split / str(index % 4) / f"{index:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path, quality=95, subsampling=0 if index % 4 == 0 else 2)


def cpu_seconds(workers: Sequence[int]) -> float:
    """Of this process and of its live worker processes, to the nanosecond (getrusage of another one has 10 ms)."""
    total = time.process_time()
    for pid in workers:
        for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            total += int(stat.read_text().split()[0]) * 1e-9
    return total


def ours(name: str, data: Path, decoder: str) -> tuple[Loaded, decode.Decoder, Source]:
    """Our loader, as the trainer uses it.

    Raises:
        TrainError: the decoder does not work here.
    """
    config = Config(data=str(data), image_size=SIDE, workers=WORKERS)
    source, chosen = open_dataset(str(data)).train, decode.choose_decoder(decoder)
    loader, count = Loader(config, source, chosen, BATCH, local_world=1, pin=False), len(source.labels)
    epochs = iter(range(1_000_000))

    def epoch() -> Iterator[int]:
        number = next(epochs)
        order = sampler.order(0, number, count)
        pieces = (order[start : start + BATCH] for start in range(0, count, BATCH))
        for batch in loader.batches((Request(piece, len(piece)) for piece in pieces), number):
            yield len(batch.labels)

    return Loaded(name, epoch, close=loader.close), chosen, source


def boxes(files: Sequence[Path]) -> list[Box]:
    """The random crop of each file, the same for every contestant."""
    found = []
    for index, path in enumerate(files[:CROPS]):
        numbers = sampler.uniforms(0, 0, np.array([index]), augment.NUMBERS)[0].tolist()
        left, top, width, height = augment.random_box(*Image.open(path).size, 0.08, numbers)
        found.append((int(left), int(top), int(width), int(height)))
    return found


def of_file(path: Path, box: Box) -> NDArray[np.uint8]:
    """The reference: Pillow, of the original file."""
    out = np.empty((SIDE, SIDE, 3), np.uint8)
    decode.Pillow().decode(path.read_bytes(), lambda *_: augment.View(box), out)
    return out


def of_record(decoder: decode.Decoder, source: Source, index: int, box: Box, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Our decoder's crop of a record that may be smaller than the original of `size`: the box shrinks with it."""
    out = np.empty((SIDE, SIDE, 3), np.uint8)

    def choose(width: int, height: int) -> augment.View:
        x, y = width / size[0], height / size[1]
        return augment.View((box[0] * x, box[1] * y, box[2] * x, box[3] * y))

    record = source.read(index)
    decoder.resize(record, choose, out) if isinstance(record, np.ndarray) else decoder.decode(record, choose, out)
    return out


def psnr(pairs: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> float:
    """Of all pairs' mean squared error, in dB."""
    error = float(np.mean([((a.astype(float) - b.astype(float)) ** 2).mean() for a, b in pairs]))
    return float("inf") if error == 0 else 10 * float(np.log10(255**2 / error))


def contestants(folder: Path) -> list[Row]:
    """All that can run here, the classic recipe first; says what cannot, and why."""
    packed, raw = folder.parent / "jpeg400.pack", folder.parent / "raw256.pack"
    pack.main([str(folder), str(packed), "--max-side", "400", "--quality", "90"])
    pack.main([str(folder), str(raw), "--raw", "256"])
    files = sorted((folder / "train").glob("*/*.jpg"))
    crops = list(zip(files, boxes(files), strict=False))
    reference = [of_file(*crop) for crop in crops]
    rows = [Row(classic(folder / "train"), None)]
    for package, peer in PEERS.items():
        try:
            loaded = peer(folder / "train")
        except ImportError as error:
            print(f"left out {package}: {error}")
            continue
        crop = loaded.crop
        pairs = [(a, crop(*b)) for a, b in zip(reference, crops, strict=True)] if crop else []
        rows.append(Row(loaded, psnr(pairs) if pairs else None))
    for name, data, decoder in (
        (COMPILED, folder, "roi"),
        (WITHOUT, folder, "simplejpeg"),
        (BARE, folder, "torchvision"),
        ("ours, Pillow", folder, "pil"),
        (PACKED, packed, "roi"),
        ("ours, torchvision, packed JPEG <= 400 px", packed, "torchvision"),
        ("ours, compiled, packed raw 256 px", raw, "roi"),
    ):
        try:
            loaded, chosen, source = ours(name, data, decoder)
        except TrainError as error:
            print(f"left out {name}: {error}")
            continue
        made = [of_record(chosen, source, i, box, Image.open(path).size) for i, (path, box) in enumerate(crops)]
        rows.append(Row(loaded, psnr(list(zip(reference, made, strict=True)))))
    return rows


def race(rows: Sequence[Row], rounds: int) -> None:
    """Turn by turn, beginning with another one each round; the first pass of each is not counted."""
    for row in rows:
        sum(row.loaded.epoch())
    for turn in range(rounds):
        first = turn * len(rows) // rounds
        for row in [*rows[first:], *rows[:first]]:
            workers = row.loaded.workers()
            cpu, wall = cpu_seconds(workers), time.perf_counter()
            images = sum(row.loaded.epoch())
            row.per_cpu_s.append(images / (cpu_seconds(workers) - cpu))
            row.per_s.append(images / (time.perf_counter() - wall))


def ratios(row: Row, base: Row) -> list[float]:
    """Of images per CPU-second, round by round."""
    return [ours / theirs for ours, theirs in zip(row.per_cpu_s, base.per_cpu_s, strict=True)]


def main() -> None:
    """Prints the table and the targets, and writes both as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = report.machine() | {"torch": torch.__version__, "images": options.images, "rounds": options.rounds}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "images"
        make_images(folder, options.images)
        sizes = [path.stat().st_size for path in folder.rglob("*.jpg")]
        print(f"{options.images} JPEGs of {sum(sizes) / len(sizes) / 1e3:.0f} kB on average, load {result['load']}")
        rows = contestants(folder)
        race(rows, options.rounds)
        for row in rows:
            row.loaded.close()
    named = {row.loaded.name: row for row in rows}
    table, kept = [["", "images/CPU-s", "images/s", "ratio", "min", "max", "PSNR dB"]], {}
    for name, row in named.items():
        ratio = report.summary(ratios(row, rows[0]))
        rate, wall = report.summary(row.per_cpu_s), report.summary(row.per_s)
        kept[name] = {"images_per_cpu_s": rate, "images_per_s": wall, "ratio": ratio, "psnr": row.psnr}
        spread = [f"{ratio[key]:.2f}" for key in ("median", "min", "max")]
        quality = "" if row.psnr is None else f"{row.psnr:.1f}"
        table.append([name, f"{rate['median']:.0f}", f"{wall['median']:.0f}", *spread, quality])
    goals, verdicts = [["", "against", "ratio", "target", ""]], []
    for name, base, target in TARGETS:
        if name in named and base in named:
            ratio = report.summary(ratios(named[name], named[base]))
            met = ratio["median"] >= target
            verdicts.append({"ours": name, "against": base, "ratio": ratio, "target": target, "met": met})
            goals.append([name, base, f"{ratio['median']:.2f}", f">= {target}", "met" if met else "NOT MET"])
    print(f"\n{report.table(table)}\n\n{report.table(goals)}")
    if options.json:
        report.write(options.json, result | {"rows": kept, "targets": verdicts})


if __name__ == "__main__":
    main()
