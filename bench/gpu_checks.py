"""The checks of bench/gpu.py, one per process: python -m bench.gpu_checks NAME RESULT.json [--dry].

Each returns its figures and "ok": whether the trainer is right, or None if there is nothing to be wrong.
"""

from __future__ import annotations

import copy
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from bench.step import PUBLISHED, TARGET, compare, our_loop, timed
from train.config import Config, parse
from train.data.batch import Request, Transfer
from train.data.decode import choose_decoder
from train.data.loader import Loader
from train.data.open import open_dataset
from train.data.source import Pixels
from train.hardware import device_name, ideal_seconds, peak_memory
from train.loop import train
from train.models import make_model
from train.parallel.ddp import distributed
from train.parallel.world import StopSignal, World, start
from train.setup import prepare
from train.syncbn import SyncBatchNorm

ROOT = Path(__file__).resolve().parents[1]
DATA_WAIT = 0.02  # the largest share of a step's time
LOST_POINTS = 2.0  # top-1, of mixed precision against fp32
Figures = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Scale:
    """The real sizes on a GPU, or small ones on a CPU."""

    dry: bool

    def world(self) -> World:
        return start(Config(data="", device="cpu" if self.dry else "cuda"))

    def options(self, text: str) -> Config:
        """ResNet-50 at its usual size, or a small model."""
        small = "--arch smallcnn --image-size 32 --batch-size 8 --device cpu --workers 1 --prefetch 1"
        large = "--arch resnet50 --image-size 224 --batch-size 256 --device cuda"
        return parse([*(small if self.dry else large).split(), *text.split()])

    def pick(self, real: T, dry: T) -> T:
        return dry if self.dry else real


@dataclass(frozen=True)
class Numbered:
    """Images whose pixels all are their label."""

    labels: NDArray[np.int64]

    def name(self, index: int) -> str:
        return f"#{index}"

    def read(self, index: int) -> Pixels:
        return np.full((32, 32, 3), self.labels[index], np.uint8)


def slots(scale: Scale) -> Figures:
    """Images stay with their labels while the GPU is far behind the loader."""
    device, size, count = scale.world().device, 256, scale.pick(100, 8) * 256
    source = Numbered(np.arange(count, dtype=np.int64) % 251)
    config = parse(f"--data unused --image-size 32 --augment none --flip 0 --batch-size {size} --prefetch 2".split())
    loader = Loader(config, source, choose_decoder("pil"), size, 1, Transfer(device))
    slow = torch.randn(scale.pick(4096, 64), scale.pick(4096, 64), device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    requests = (Request(np.arange(start, start + size), size) for start in range(0, count, size))
    for batch in loader.batches(requests, 0):
        for _ in range(20):
            slow = slow @ slow / slow.norm()
        wrong += (batch.images[:, 0, 0, 0] != batch.labels).sum()  # queued behind the products
    loader.close()
    return {"ok": int(wrong) == 0, "wrong": int(wrong), "images": count}


def trained(scale: Scale, options: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a whole run in this process."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        config = scale.options(f"{options} --output {folder}")
        world = start(config)
        train(config, world, StopSignal(world))
        return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def amp(scale: Scale) -> Figures:
    """Mixed precision learns the digits as well as fp32."""
    model = scale.options("--data unused").arch if scale.dry else "cifar_resnet20"
    digits = (
        f"--data {ROOT}/jobs/data/digits.tar --arch {model} --image-size 32 --val-resize 32 --augment shift --flip 0"
    )
    digits += f" --batch-size 64 --epochs {scale.pick(10, 1)} --lr 0.4 --log-every 50 --no-tf32"
    found = {}
    for level in ("none", "bf16") if scale.dry else ("none", "bf16", "fp16", "O2"):
        found[level] = round(trained(scale, f"{digits} --amp {level}")[-1]["top1"], 2)
    return {"ok": scale.dry or min(found.values()) >= found["none"] - LOST_POINTS, **found}


def group(scale: Scale) -> World:
    """A process group of this process alone, over NCCL on a GPU."""
    world = scale.world()
    backend = "gloo" if scale.dry else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return world


def relative(a: Tensor, b: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((a.detach().double() - b.detach().double()).abs().max() / b.detach().double().abs().max())


def syncbn(scale: Scale) -> Figures:
    """Our synchronised batch norm, its all-reduces over NCCL, equals torch's batch norm."""
    device = group(scale).device
    errors = {}
    for kind in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        x, incoming = (torch.randn(64, 32, 14, 14, device=device).to(kind) for _ in range(2))
        ours, oracle = SyncBatchNorm(32).to(device), nn.BatchNorm2d(32).to(device)
        mine, theirs = x.clone().requires_grad_(), x.float().requires_grad_()
        out, expected = ours(mine), oracle(theirs)
        out.backward(incoming)
        expected.backward(incoming.float())
        pairs = [(out, expected), (mine.grad, theirs.grad), (ours.weight.grad, oracle.weight.grad)]
        errors[kind] = max(relative(a, b) for a, b in [*pairs, (ours.running_var, oracle.running_var)])
    dist.destroy_process_group()
    ok = errors[torch.float32] < 1e-5 and errors[torch.bfloat16] < 1e-2
    return {"ok": ok, "fp32 error": f"{errors[torch.float32]:.1e}", "bf16 error": f"{errors[torch.bfloat16]:.1e}"}


def ddp(scale: Scale) -> Figures:
    """DDP's gradients, in fp64 and compressed to bf16, equal the bare model's."""
    world = group(scale)
    torch.manual_seed(0)
    bare = make_model("smallcnn", 10).to(world.device, torch.float64)
    x = torch.randn(16, 3, 32, 32, device=world.device, dtype=torch.float64)
    bare(x).square().sum().backward()
    errors = {}
    for kind in ("none", "bf16"):
        model = copy.deepcopy(bare)
        model.zero_grad(set_to_none=True)
        wrapped = distributed(model, world, Config(data="", gradient_compression=kind))
        wrapped(x).square().sum().backward()
        pairs = zip(model.parameters(), bare.parameters(), strict=True)
        errors[kind] = max(relative(ours.grad, theirs.grad) for ours, theirs in pairs)
    dist.destroy_process_group()
    ok = errors["none"] < 1e-10 < errors["bf16"] < 1e-2  # in between: the gradients have been through bf16
    return {"ok": ok, "fp64 error": f"{errors['none']:.1e}", "bf16 error": f"{errors['bf16']:.1e}"}


def step(scale: Scale) -> Figures:
    """Our loop beside a bare one, and the most memory and the share of the peak that ours needs and gets."""
    config = scale.options("--data synthetic:2000 --epochs 1 --headspace --output /nonexistent")
    result = compare(config, scale.pick(20, 1), scale.pick(5, 2))
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


def rates(scale: Scale, variants: dict[str, str]) -> dict[str, float]:
    """Images/s of our step with each variant's options, alternating."""
    world, loops, found = scale.world(), {}, dict[str, list[float]]()
    steps, runs = scale.pick(10, 1), []
    for name, options in variants.items():
        config = scale.options(f"--data synthetic:2000 --epochs 1 --headspace --output /nonexistent {options}")
        runs.append(prepare(config, world))
        loops[name] = our_loop(runs[-1], StopSignal(world))
        timed(loops[name], scale.pick(5, 1), world.device)
    for _ in range(3):
        for name, loop in loops.items():
            seconds = timed(loop, steps, world.device)[0]
            found.setdefault(name, []).append(steps * runs[0].config.batch_size / seconds)
    for run in runs:
        run.train_loader.close()
        run.val_loader.close()
        assert all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


def channels_last(scale: Scale) -> Figures:
    """The layout that a GPU's tensor cores need is no slower than the other."""
    names = ("contiguous", "channels_last")
    found = rates(scale, {name: f"--memory-format {name}" for name in names})
    ratio = round(found["channels_last"] / found["contiguous"], 3)
    return {"ok": scale.dry or ratio >= 1, "ratio": ratio, **found}


def compiled(scale: Scale) -> Figures:
    """torch.compile works with our step."""
    found = rates(scale, {"plain": "", "compiled": "" if scale.dry else "--compile"})
    ratio = round(found["compiled"] / found["plain"], 3)
    return {"ok": scale.dry or ratio >= 0.95, "ratio": ratio, **found}


def pictures(scale: Scale, folder: Path) -> Path:
    """A data set of JPEGs of 500 x 375 pixels, as ImageNet's on average: some different ones, linked many times."""
    different, copies = scale.pick(256, 16), scale.pick(32, 1)

    def write(number: int) -> None:
        random = np.random.default_rng(number)
        coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        noisy = np.asarray(coarse, np.int16) + random.integers(-12, 13, (375, 500, 3), np.int16)
        split = "val" if number % 16 == 0 else "train"
        path = folder / split / str(number % 16 // 8) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=87)
        for place in range(copies - 1):
            os.link(path, path.with_name(f"{number}-{place}.jpg"))

    (folder / "val" / "1").mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(different)))
    shutil.copy(next((folder / "train" / "1").iterdir()), folder / "val" / "1")
    return folder


def overlap(scale: Scale) -> Figures:
    """Training on JPEGs does not wait for data."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        data = pictures(scale, Path(folder) / "data")
        lines = trained(scale, f"--data {data} --epochs {scale.pick(2, 1)} --log-every 5 --lr 0.01")
    steps = [line for line in lines if line["kind"] == "step"][scale.pick(2, 0) :]
    wait = statistics.mean(line["data_wait"] for line in steps)
    rate = round(statistics.median(line["images_per_s"] for line in steps), 1)
    return {"ok": scale.dry or wait < DATA_WAIT, "data wait": f"{wait:.2%}", "images/s": rate}


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
    """`launcher up` without Docker: a node that is a process here and trains on the GPU."""
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
    return {"ok": done.returncode == 0, "last line": lines[-1] if lines else ""}


CHECKS: dict[str, Callable[[Scale], Figures]] = {
    check.__name__: check for check in (slots, syncbn, ddp, step, amp, overlap, data, launcher, channels_last)
} | {"compile": compiled}


def main(name: str, output: str, *flags: str) -> None:
    figures = CHECKS[name](Scale(dry="--dry" in flags))
    Path(output).write_text(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
