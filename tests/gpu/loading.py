"""The rows of bench/gpu.py about data: the loader by threads and decoder, training from files, decoding on the GPU."""

from __future__ import annotations

import io
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image

from bench.decoders import Crop, pillow, psnr
from bench.gpu_scale import Figures, Rows, Scale
from tests.gpu.machine import checksums
from tests.gpu.speed import Ours
from train.data.augment import NUMBERS, View, random_box
from train.data.batch import Request, Transfer
from train.data.decode import Decoder, choose_decoder
from train.data.loader import Loader
from train.data.open import open_dataset
from train.errors import TrainError
from train.log import Interval, Silent

ROOT = Path(__file__).resolve().parents[2]
DATA_WAIT = 0.02  # the largest share of a step's time
THREADS = (1, 2, 4, 8, 16, 32)
DIFFERENT, COPIES = 256, 48
PROGRAM = (sys.executable, "-m", "bench.programs.decode_alone")


def pictures(scale: Scale, folder: Path) -> Path:
    """Create a data set of JPEGs of 500 x 375 pixels (ImageNet's average), with many links to some different files."""
    size = scale.pick((500, 375), (48, 36))

    def write(number: int) -> None:
        split = "val" if number % 16 == 0 else "train"
        path = folder / split / str(number % 16 // 8) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, size))
        for link in range(COPIES - 1):
            os.link(path, path.with_name(f"{number}-{link}.jpg"))

    (folder / "val" / "1").mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(DIFFERENT)))
    (folder / "val" / "1" / "one.jpg").write_bytes(picture(0, size))
    return folder


def picture(number: int, size: tuple[int, int]) -> bytes:
    """Return a JPEG with coarse shapes and some noise."""
    random, out = np.random.default_rng(number), io.BytesIO()
    coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noisy = np.asarray(coarse, np.int16) + random.integers(-12, 13, (*size[::-1], 3), np.int16)
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=87)
    return out.getvalue()


@dataclass(frozen=True)
class Used:
    """What this process has used so far."""

    wall: float
    user: float
    system: float
    switches: int  # waits
    preempted: int
    faults: int

    @classmethod
    def now(cls) -> Used:
        found = resource.getrusage(resource.RUSAGE_SELF)
        switches = found.ru_nvcsw, found.ru_nivcsw
        return cls(time.perf_counter(), found.ru_utime, found.ru_stime, *switches, found.ru_minflt + found.ru_majflt)

    def since(self, before: Used, images: int) -> Figures:
        """Return what was used since then, per second or per image."""
        wall, user, system = (getattr(self, name) - getattr(before, name) for name in ("wall", "user", "system"))
        return {
            "images/s": round(images / wall),
            "busy cores": round((user + system) / wall, 2),
            "in the kernel": f"{system / max(user + system, 1e-9):.0%}",
            "waits/image": round((self.switches - before.switches) / images, 2),
            "preempted/image": round((self.preempted - before.preempted) / images, 3),
            "faults/image": round((self.faults - before.faults) / images, 1),
        }


def usable() -> list[Decoder]:
    """Return the decoders that work here, the fastest first."""
    found = []
    for name in ("roi", "torchvision"):
        try:
            found.append(choose_decoder(name))
        except TrainError as error:
            print(error)
    return found


def loader(scale: Scale) -> Rows:
    """The loader alone by threads and decoder; beside it the same decoding of bytes in memory, and crc32."""
    length = scale.pick(2.0, 0.1)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        path = pictures(scale, Path(folder) / "data")
        for number, decoder in enumerate(usable()):
            for threads in THREADS:
                figures = loaded(scale, path, decoder, threads, length)
                figures["of bytes in memory"] = in_memory(path, decoder, threads, length / 2)
                if number == 0:
                    figures["crc32 GB/s"] = round(checksums(threads, length / 8), 2)
                yield f"loader {decoder.name} {threads}", {"ok": None, **figures}
            for processes in (1, len(os.sched_getaffinity(0))) if number == 0 else ():
                rate = alone(path, decoder.name, processes, length / 2)
                yield f"processes {decoder.name} {processes}", {"ok": None, "images/s": rate}


def loaded(scale: Scale, path: Path, decoder: Decoder, threads: int, length: float) -> Figures:
    """Return the rate of the trainer's loader, up to batches on the device."""
    config, device = scale.options(f"--data {path} --workers {threads}"), scale.world().device
    source = open_dataset(config.data).train
    own = Loader(config, source, decoder, config.batch_size, 1, Transfer(device))
    size = config.batch_size
    requests = (Request(np.arange(start, start + size), size) for start in count(0, size))
    batches = own.batches(requests, 0)
    for _ in range(config.prefetch + 1):  # until all slots were used once, so that their memory is there
        next(batches)
    before, images = Used.now(), 0
    while time.perf_counter() - before.wall < length:
        next(batches)
        images += size
    torch.cuda.synchronize(device)
    found = Used.now().since(before, images)
    batches.close()
    own.close()
    return found


def in_memory(path: Path, decoder: Decoder, threads: int, length: float) -> str:
    """Return the rate of the decoder on files that were read before, without a loader, and the cores it kept busy."""
    crops = crops_of(path)
    until = time.perf_counter() + length

    def one(offset: int) -> int:
        done, out = 0, np.empty((224, 224, 3), np.uint8)
        for crop in cycle(crops[offset:] + crops[:offset]):
            decode(decoder, crop, out)
            done += 1
            if time.perf_counter() > until:
                return done
        return done

    before = Used.now()
    with ThreadPoolExecutor(threads) as pool:
        images = sum(pool.map(one, range(threads)))
    found = Used.now().since(before, images)
    return f"{found['images/s']} images/s, {found['busy cores']} busy cores"


def crops_of(path: Path) -> list[Crop]:
    """Return some files of the data set with a random crop each."""
    files = [file for file in sorted(path.glob("train/*/*.jpg")) if "-" not in file.name]
    numbers = np.random.default_rng(1).random((len(files), NUMBERS)).tolist()
    found = []
    for file, row in zip(files, numbers, strict=True):
        left, top, width, height = random_box(*Image.open(file).size, 0.08, row)
        found.append(Crop(file.read_bytes(), (int(left), int(top), int(width), int(height))))
    return found


def decode(decoder: Decoder, crop: Crop, out: Any) -> None:
    decoder.decode(crop.data, lambda *_: View(crop.box), out)


def alone(path: Path, decoder: str, processes: int, length: float) -> int:
    """Return images/s of single-threaded processes that decode at the same time."""
    command = [*PROGRAM, str(path), decoder, str(length)]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for process in running:
        process.stdout.readline()  # ready
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    return round(sum(float(process.communicate()[0]) for process in running))


class Waits(Silent):
    """Keeps the share of each interval in which training waited for data."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def progress(self, now: Interval) -> None:
        self.shares.append(now.data_wait)


def files(scale: Scale) -> Figures:
    """Training on JPEGs does not wait for data, and is as fast as on one batch that stays on the device."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        path = pictures(scale, Path(folder) / "data")
        base = f"--data {path} --epochs 2 --log-every 5 --output /nonexistent"
        half = max(1, len(os.sched_getaffinity(0)) // 2)
        variants = {"repeated": "--headspace", "loaded": "", f"loaded, {half} threads": f"--workers {half}"}
        with Ours(scale, variants, base) as ours:
            waits = ours.runs["loaded"].log = Waits()
            found, decoder = ours.rates(), ours.runs["loaded"].decoder
    wait, ratio = statistics.mean(waits.shares or [0.0]), round(found["loaded"] / found["repeated"], 3)
    ok = scale.dry or (wait < DATA_WAIT and ratio >= 0.95)
    return {"ok": ok, "data wait": f"{wait:.2%}", "ratio": ratio, **found, "decoder": decoder}


def decode_jpeg(scale: Scale) -> Rows:
    """torchvision's decoder on the GPU, then crops there, beside ours on all cores; in dB against Pillow's crops."""
    side, device, length = scale.pick(224, 8), scale.world().device, scale.pick(2.0, 0.1)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        path = pictures(scale, Path(folder) / "data")
        crops = crops_of(path)
        expected = list(pillow(crops, side))
        decoder = choose_decoder("auto")
        outs = [np.empty((side, side, 3), np.uint8) for _ in crops]
        for crop, out in zip(crops, outs, strict=True):
            decode(decoder, crop, out)
        quality = decibels(outs, expected)
        cores = len(os.sched_getaffinity(0))
        rate = in_memory(path, decoder, cores, length)
        yield f"decoded by {decoder.name}", {"ok": None, "dB": quality, f"on {cores} threads": rate}
    data = [torch.frombuffer(bytearray(crop.data), dtype=torch.uint8) for crop in crops]
    whole = on_device(data, device)
    cut = [resampled(image, crop, side) for image, crop in zip(whole, crops, strict=True)]
    found = decibels([image.permute(1, 2, 0).cpu().numpy() for image in cut], expected)
    only = repeated(lambda: on_device(data, device), len(data), length, device)

    def everything() -> None:
        images = on_device(data, device)
        torch.stack([resampled(image, crop, side) for image, crop in zip(images, crops, strict=True)])

    both = repeated(everything, len(data), length, device)
    yield "decoded on the GPU", {"ok": None, "dB": found, "images/s": both, "without crops": only, "batch": len(data)}


def on_device(data: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return the whole images, (3, height, width) each."""
    images: list[torch.Tensor] = torchvision.io.decode_jpeg(
        list(data), mode=torchvision.io.ImageReadMode.RGB, device=device
    )
    return images


def resampled(image: torch.Tensor, crop: Crop, side: int) -> torch.Tensor:
    left, top, width, height = crop.box
    part = image[None, :, top : top + height, left : left + width].float()
    small = torch.nn.functional.interpolate(part, (side, side), mode="bilinear", antialias=True)
    return small[0].round().clamp(0, 255).to(torch.uint8)


def repeated(what: Any, images: int, length: float, device: torch.device) -> int:
    """Return images/s of calls for some seconds, after one."""
    what()
    torch.cuda.synchronize(device)
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() - begin < length:
        what()
        calls += 1
    torch.cuda.synchronize(device)
    return round(calls * images / (time.perf_counter() - begin))


def decibels(found: Sequence[Any], expected: Sequence[Any]) -> str:
    """Return the median and the minimum of PSNR."""
    values = [psnr(ours, theirs) for ours, theirs in zip(found, expected, strict=True)]
    return f"{statistics.median(values):.1f}, at least {min(values):.1f}"
