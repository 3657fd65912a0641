"""The checks of bench/gpu.py, one per process: python -m tests.gpu.checks NAME RESULT.json [--dry].

Each returns its results and "ok": whether the trainer is correct, or None if the check cannot fail.
--dry: on a simulated GPU on the CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from bench.gpu_scale import Figures, Scale
from bench.step import PUBLISHED, TARGET, compare, our_loop, timed
from tests.gpu import numerics, pretend
from train.config import Config
from train.data.batch import Batch, Copy, Event, Request, Transfer
from train.data.decode import choose_decoder
from train.data.loader import Loader
from train.data.open import open_dataset
from train.data.source import Pixels
from train.distributed.world import StopSignal, start
from train.hardware import device_name, ideal_seconds, peak_memory
from train.models import make_model
from train.step import Plan
from train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
DATA_WAIT = 0.02  # the largest share of a step's time
LOST_POINTS = 2.0  # top-1, of mixed precision against fp32
LATE, VERY_LATE = 20_000_000, 400_000_000  # cycles, about 10 and 200 ms


@dataclass(frozen=True)
class Numbered:
    """Images in which every pixel equals the label."""

    labels: NDArray[np.int64]

    def name(self, index: int) -> str:
        return f"#{index}"

    def read(self, index: int) -> Pixels:
        return np.full((32, 32, 3), self.labels[index], np.uint8)


class LateTransfer(Transfer):
    """A transfer with a delayed copy stream; waiting for its events can be disabled, which the check must detect."""

    def __init__(self, device: torch.device, cycles: int = 0, waits: bool = True, synchronises: bool = True) -> None:
        super().__init__(device)
        self._cycles, self._waits, self._synchronises = cycles or LATE, waits, synchronises

    def start(self, batch: Batch) -> Copy:
        # all in pinned memory: a copy from other memory would wait for the stream
        pinned = replace(batch, labels=batch.labels.pin_memory(), weights=batch.weights.pin_memory())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(self._cycles)  # noqa: SLF001 - torch's own tests delay a stream with it
        copy = super().start(pinned)
        assert copy.done
        return Copy(copy.batch, Loose(copy.done, self._waits, self._synchronises))


@dataclass(frozen=True)
class Loose:
    """An event for which some waits are skipped."""

    event: Event
    waits: bool
    synchronises: bool

    def wait(self, stream: Any = None) -> None:
        if self.waits:
            self.event.wait(stream)

    def synchronize(self) -> None:
        if self.synchronises:
            self.event.synchronize()


def misplaced(transfer: Transfer, batches: int, products: int = 0, immediately: bool = True) -> int:
    """Return the number of wrong images or labels, compared after `products` matrix products or after all copies."""
    device, size = transfer.device, 256
    source = Numbered(np.arange(batches * size, dtype=np.int64) % 251)
    config = Config(data="", image_size=32, augment="none", flip=0, batch_size=size, prefetch=2, epochs=1)
    loader = Loader(config, source, choose_decoder("pil"), size, 1, transfer)
    slow = torch.randn(4096, 4096, device=device) if products else None
    wrong, kept = torch.zeros((), dtype=torch.int64, device=device), []
    expected = torch.from_numpy(source.labels).to(device).split(size)

    def compare(batch: Batch, labels: torch.Tensor) -> torch.Tensor:
        return ((batch.images[:, 0, 0, 0] != labels) | (batch.labels != labels)).sum()

    requests = (Request(np.arange(start, start + size), size) for start in range(0, batches * size, size))
    for batch, labels in zip(loader.batches(requests, 0), expected, strict=True):
        for _ in range(products):
            slow = slow @ slow / slow.norm()
        if immediately:
            wrong += compare(batch, labels)  # queued behind the products
        else:
            kept.append(batch)
    loader.close()
    torch.cuda.synchronize()
    return int(wrong) + sum(int(compare(*pair)) for pair in zip(kept, expected, strict=False))


def slots(scale: Scale) -> Figures:
    """Images match their labels while copies or computation are delayed; without events, the check detects errors.

    Computation waits for a copy; decoding into the memory of a batch waits until the batch has been copied.
    """
    device = scale.world().device
    found = {
        "computing late": misplaced(Transfer(device), 50, scale.pick(10, 0)),
        "copies late": misplaced(LateTransfer(device), 50),
        "without wait": misplaced(LateTransfer(device, VERY_LATE, waits=False), 8),
        "memory used again": misplaced(LateTransfer(device, waits=False), 50, immediately=False),
        "without synchronize": misplaced(LateTransfer(device, VERY_LATE, False, False), 8, immediately=False),
    }
    right = found["computing late"] == found["copies late"] == found["memory used again"] == 0
    return {"ok": right and found["without wait"] > 0 and found["without synchronize"] > 0, **found}


def trained(scale: Scale, options: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a complete run in this process."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        config = scale.options(f"{options} --output {folder}")
        world = start(config)
        Trainer(config, world).train(StopSignal(world))
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def amp(scale: Scale) -> Figures:
    """Mixed precision learns the digits as well as fp32, and synchronised batch norm as well as plain batch norm."""
    small = "--arch cifar_resnet20 --image-size 32 --val-resize 32"
    digits = f"--data {ROOT}/jobs/data/digits.tar {scale.pick(small, '')} --augment shift --flip 0 --batch-size 64"
    digits += " --epochs 10 --lr 0.4 --log-every 50 --no-tf32"
    levels = {level: f"--amp {level}" for level in ("none", "bf16", "fp16", "O2")} | {
        "syncbn": "--amp bf16 --syncbn custom"
    }
    found = {name: round(trained(scale, f"{digits} {options}")[-1]["top1"], 2) for name, options in levels.items()}
    return {"ok": scale.dry or min(found.values()) >= found["none"] - LOST_POINTS, **found}


def step(scale: Scale) -> Figures:
    """Our loop compared with a bare one, and its peak memory and share of the GPU's peak performance."""
    config = scale.options("--data synthetic --epochs 1 --headspace --output /nonexistent")
    result = compare(config, 20, 5)
    found, device = result["wall time"], scale.world().device
    ideal = ideal_seconds(make_model(config.arch, 1000), config.image_size, device_name(device), result["amp"], True)
    rate, ratio = found["ours"]["median"], found["ratio"]["median"]
    for name, published, source in () if scale.dry else PUBLISHED:
        print(f"published {published:9.1f} images/s   {name}, {source}")
    return {
        "ok": scale.dry or ratio >= TARGET,
        "device": device_name(device),
        "torch": torch.__version__,
        "amp": result["amp"],
        "images/s": round(rate, 1),
        "bare images/s": round(found["bare"]["median"], 1),
        "ratio": ratio,
        **({"MFU": f"{rate * ideal:.1%}"} if ideal else {}),
        "peak MB": round(peak_memory(device), 1),
    }


def rates(scale: Scale, variants: dict[str, str], data: str = "synthetic --headspace") -> dict[str, float]:
    """Return images/s of our step with each variant's options, alternating."""
    world, loops, runs, found = scale.world(), {}, {}, dict[str, list[float]]()
    for name, options in variants.items():
        runs[name] = Trainer(scale.options(f"--data {data} --epochs 1 --output /nonexistent {options}"), world)
        loops[name] = our_loop(runs[name], StopSignal(world))
        timed(loops[name], 5, world.device)
    for _ in range(3):
        for name, loop in loops.items():
            seconds = timed(loop, 10, world.device)[0]
            found.setdefault(name, []).append(10 * runs[name].config.batch_size / seconds)
    for run in runs.values():
        run.close()
        assert all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


def channels_last(scale: Scale) -> Figures:
    """The layout for tensor cores is not slower than the other one."""
    names = ("contiguous", "channels_last")
    found = rates(scale, {name: f"--memory-format {name}" for name in names})
    ratio = round(found["channels_last"] / found["contiguous"], 3)
    return {"ok": scale.dry or ratio >= 1, "ratio": ratio, **found}


def options(scale: Scale) -> Figures:
    """Cost of a step with synchronised batch norm, averaged weights and fp16 loss scaling; cannot fail."""
    variants = {"plain": "", "syncbn": "--syncbn custom", "ema": "--ema-decay 0.999", "fp16": "--amp fp16"}
    found = rates(scale, variants | {"lars": "--optimizer lars"})
    return {"ok": None, **{name: round(rate / found["plain"], 3) for name, rate in found.items() if name != "plain"}}


def compiled(scale: Scale) -> Figures:
    """torch.compile works with our step, and a short batch does not slow down later full batches."""
    found = rates(scale, {"plain": "", "compiled": "--compile"})
    world = scale.world()
    run = Trainer(scale.options("--data synthetic --headspace --epochs 1 --output /nonexistent --compile"), world)
    loop, images = our_loop(run, StopSignal(world)), run.config.batch_size
    timed(loop, 5, world.device)
    before = min(timed(loop, 10, world.device)[0] for _ in range(3))
    full = next(run.train_loader.batches([Request(np.arange(images), images)], 0))
    for count in (images - 3, images - 5):
        short = Batch(full.images[:count], full.labels[:count], full.weights[:count], count, last=True)
        run.step.accumulate(short, Plan(0.01, 0))
        run.step.update(Plan(0.01, 0))
    after = min(timed(loop, 10, world.device)[0] for _ in range(3))
    run.close()
    ratio, kept = round(found["compiled"] / found["plain"], 3), round(before / after, 3)
    return {"ok": scale.dry or (ratio >= 0.95 and kept >= 0.95), "ratio": ratio, "after short batches": kept, **found}


def pictures(scale: Scale, folder: Path) -> Path:
    """Create a data set of JPEGs of 500 x 375 pixels (ImageNet's average), with many links to some different files."""
    different, copies, size = 256, 48, scale.pick((500, 375), (48, 36))

    def write(number: int) -> None:
        random = np.random.default_rng(number)
        coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
        noisy = np.asarray(coarse, np.int16) + random.integers(-12, 13, (*size[::-1], 3), np.int16)
        split = "val" if number % 16 == 0 else "train"
        path = folder / split / str(number % 16 // 8) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=87)
        for link in range(copies - 1):
            os.link(path, path.with_name(f"{number}-{link}.jpg"))

    (folder / "val" / "1").mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(different)))
    shutil.copy(next((folder / "train" / "1").iterdir()), folder / "val" / "1")
    return folder


def overlap(scale: Scale) -> Figures:
    """Training on JPEGs does not wait for data, and is as fast as on one batch that stays on the device."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        data = pictures(scale, Path(folder) / "data")
        lines = trained(scale, f"--data {data} --epochs 2 --log-every 5 --lr 0.01")
        found = rates(scale, {"repeated": "--headspace --epochs 2", "loaded": "--epochs 2"}, str(data))
    steps = [line for line in lines if line["kind"] == "step"][2:]
    wait, ratio = statistics.mean(line["data_wait"] for line in steps), round(found["loaded"] / found["repeated"], 3)
    ok = scale.dry or (wait < DATA_WAIT and ratio >= 0.95)
    return {"ok": ok, "data wait": f"{wait:.2%}", "ratio": ratio, **found}


def data(scale: Scale) -> Figures:
    """The loader alone, on all cores."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        config = scale.options(f"--data {pictures(scale, Path(folder) / 'data')}")
        world, dataset, decoder = scale.world(), open_dataset(config.data), choose_decoder(config.decoder)
        loader = Loader(config, dataset.train, decoder, config.batch_size, 1, Transfer(world.device))
        count = len(dataset.train.labels)

        def requests() -> Iterator[Request]:
            for begin in range(0, count, config.batch_size):
                indices = np.arange(begin, min(begin + config.batch_size, count))
                yield Request(indices, len(indices))

        def epoch(number: int) -> None:
            for _ in loader.batches(requests(), number):
                pass

        epoch(0)
        seconds = timed(epoch, 1, world.device)[0]
        loader.close()
    cores = len(os.sched_getaffinity(0))
    return {"ok": None, "images/s": round(count / seconds), "cores": cores, "decoder": decoder.name}


def launcher(scale: Scale) -> Figures:
    """`launcher up` without Docker: a node is a process on this machine and trains on the GPU."""
    if missing := [name for name in ("pydantic", "typer", "yaml", "rich") if not importlib.util.find_spec(name)]:
        return {"ok": None, "why": f"not installed: {', '.join(missing)}"}
    device = scale.pick("auto", "cpu")
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        for name in ("train", "jobs"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        command = [sys.executable, "-m", "launcher", "up", "jobs/quickstart.yaml", "--set", "nodes=[local]"]
        command += ["--set", "run.args.epochs=2", "--set", f"run.args.device={device}"]
        with socket.socket() as free:
            free.bind(("", 0))
            command += ["--set", f"port={free.getsockname()[1]}"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110, check=False
        )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return {"ok": done.returncode == 0, "last lines": lines[-3:]}


CHECKS: dict[str, Callable[[Scale], Figures]] = {
    check.__name__: check for check in (slots, step, amp, overlap, data, launcher, channels_last, options)
}
NUMERICS = (numerics.syncbn, numerics.ddp, numerics.fsdp, numerics.fp16, numerics.ema)
CHECKS |= {check.__name__: check for check in NUMERICS} | {"compile": compiled}


def check(name: str, dry: bool) -> Figures:
    with pretend.gpu() if dry else nullcontext():
        return CHECKS[name](Scale(dry))


def main(name: str, output: str, *flags: str) -> None:
    figures = check(name, "--dry" in flags)
    Path(output).write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
