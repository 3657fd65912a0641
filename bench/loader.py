"""Files to batches: images per CPU-second of our loader against what a user would use instead, in one run.

    python -m bench.loader [--images 256] [--rounds 9] [--json FILE]

ImageNet-sized JPEGs (made here from two photos), RandomResizedCrop to 224, batches of 64, two workers each. Every
loader has its own process, and they take turns, one pass over the images each. The ratio is the median over rounds, so
that other load on the machine affects both sides. The CPU-seconds of a pass are all that the process and its workers
have used since the end of the previous pass, so read-ahead is included. Each loader has its usual settings. Beside
its rate stands how close it comes (in dB, PSNR) to Pillow's antialiased crops, for the same 32 crops: of the files, and
for packed data of the packed images. `bench.decoders` compares the decoders alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bench import report
from bench.decoders import psnr as decibels
from bench.loader_variants import (
    CLASSIC,
    COMPILED,
    DALI,
    PACKED,
    TIMM,
    TORCHVISION,
    UINT8,
    VARIANTS,
    Box,
    Loaded,
    Places,
    of_file,
)
from train.data import augment, pack, sampler
from train.errors import TrainError

SIZES = ((500, 375), (375, 500), (500, 333), (333, 500), (500, 500), (640, 480), (400, 300), (480, 360))
CROPS = 32  # images for PSNR
TARGETS = (
    (COMPILED, CLASSIC, 3.5),
    (TORCHVISION, CLASSIC, 2.5),
    (PACKED, CLASSIC, 7.0),
    (COMPILED, UINT8, 1.3),
    (COMPILED, TIMM, 1.3),
    (COMPILED, DALI, 1.3),
)


@dataclass
class Row:
    """One loader and its results."""

    process: BaseProcess
    pipe: Connection
    psnr: tuple[float, float] | None = None  # dB, median and minimum; None: the loader itself uses Pillow
    per_cpu_s: list[float] = field(default_factory=list)  # images


def make_images(folder: Path, count: int) -> None:
    """Writes `count` JPEGs of quality 95, three in four 4:2:0: resized crops of two photos, varied in brightness."""
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
    """CPU seconds of this process and its live workers, in nanosecond resolution (other sources have 10 ms)."""
    total = time.process_time()
    for pid in workers:
        for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            total += int(stat.read_text().split()[0]) * 1e-9
    return total


def serve(name: str, places: Places, pipe: Connection) -> None:
    """A loader's process: sends its PSNR, or why it cannot run; then, for each pass, images and CPU-seconds."""
    torch.set_num_threads(1)
    try:
        loaded = VARIANTS[name](places)
        pipe.send(psnr(places.files, loaded))
    except (ImportError, TrainError) as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    sum(loaded.epoch())
    before = cpu_seconds(loaded.workers())
    while True:
        pipe.recv()
        images, now = sum(loaded.epoch()), cpu_seconds(loaded.workers())
        pipe.send((images, now - before))
        before = now


def psnr(files: Sequence[Path], loaded: Loaded) -> tuple[float, float] | None:
    """Median and minimum in dB of the first files' random crops against Pillow's, or None without crops."""
    if loaded.crop is None:
        return None
    found = []
    for index, path in enumerate(files[:CROPS]):
        numbers = sampler.uniforms(0, 0, np.array([index]), augment.NUMBERS)[0].tolist()
        left, top, width, height = augment.random_box(*Image.open(path).size, 0.08, numbers)
        box: Box = (int(left), int(top), int(width), int(height))
        found.append(decibels(loaded.crop(path, box), (loaded.expected or of_file)(path, box)))
    return float(np.median(found)), min(found)


def begin(places: Places) -> dict[str, Row]:
    """Start every loader that works on this machine; print the others with the reason."""
    spawn, rows = multiprocessing.get_context("spawn"), {}
    for name in VARIANTS:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(name, places, theirs))
        process.start()
        theirs.close()
        answer = ours.recv()
        if isinstance(answer, str):
            print(f"skipped {name}: {answer}")
            process.join()
        else:
            rows[name] = Row(process, ours, answer)
    return rows


def race(rows: Sequence[Row], rounds: int) -> None:
    """One pass of each loader per round, starting with a different one each round; the first round is a warm-up."""
    for turn in range(rounds + 1):
        first = turn * len(rows) // (rounds + 1)
        for row in [*rows[first:], *rows[:first]]:
            row.pipe.send(turn)
            images, cpu = row.pipe.recv()
            if turn:
                row.per_cpu_s.append(images / cpu)


def ratios(row: Row, base: Row) -> list[float]:
    """Ratios of images per CPU-second, one per round."""
    return [ours / theirs for ours, theirs in zip(row.per_cpu_s, base.per_cpu_s, strict=True)]


def main() -> None:
    """Prints the table and the targets, and writes both as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = report.machine() | {"torch": torch.__version__, "images": options.images, "rounds": options.rounds}
    with tempfile.TemporaryDirectory() as root:
        places = Places(Path(root) / "images", Path(root) / "jpeg400.pack", Path(root) / "raw256.pack")
        make_images(places.folder, options.images)
        sizes = [path.stat().st_size for path in places.files]
        print(f"{options.images} JPEGs of {sum(sizes) / len(sizes) / 1e3:.0f} kB on average, load {result['load']}")
        pack.main([str(places.folder), str(places.packed), "--max-side", "400", "--quality", "90"])
        pack.main([str(places.folder), str(places.raw), "--raw", "256"])
        rows = begin(places)
        try:
            race(list(rows.values()), options.rounds)
        finally:
            for row in rows.values():
                row.process.terminate()
    table, kept = [["", "images/CPU-s", "ratio", "min", "max", "dB median", "minimum"]], {}
    for name, row in rows.items():
        ratio = report.summary(ratios(row, rows[CLASSIC]))
        rate = report.summary(row.per_cpu_s)
        kept[name] = {"images_per_cpu_s": rate, "ratio": ratio, "psnr": row.psnr}
        spread = [f"{ratio[key]:.2f}" for key in ("median", "min", "max")]
        quality = [f"{value:.1f}" for value in row.psnr] if row.psnr else ["Pillow", "Pillow"]
        table.append([name, f"{rate['median']:.0f}", *spread, *quality])
    goals, verdicts = [["", "against", "ratio", "target", ""]], []
    for name, base, target in TARGETS:
        if name in rows and base in rows:
            ratio = report.summary(ratios(rows[name], rows[base]))
            met = ratio["median"] >= target
            verdicts.append({"ours": name, "against": base, "ratio": ratio, "target": target, "met": met})
            goals.append([name, base, f"{ratio['median']:.2f}", f">= {target}", "met" if met else "NOT MET"])
    print(f"\n{report.table(table)}\n\n{report.table(goals)}")
    if options.json:
        report.write(options.json, result | {"rows": kept, "targets": verdicts})


if __name__ == "__main__":
    main()
