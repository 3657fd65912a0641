"""Overhead of our training loop over a minimal PyTorch loop: images/s of both, same model, batch and precision.

    python -m bench.step [--arch resnet50] [--batch-size 256] [--steps 20] [--rounds 5] [--json FILE]

The bare loop has no loader, schedule, metrics or checks: a fixed batch on the device, forward, backward, SGD. Ours is
the trainer's step on a repeated batch (as with --headspace), with normalisation, metrics, schedule and the stop flag.
The loops alternate, with the order changing each round. The ratio is the median over rounds, of wall time and of CPU
time (which other load on the machine affects less). The rows "ours without" compare with our loop when it does not
measure each rank's own work (train/timing.py). On a GPU the published ResNet-50 figures are printed too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from bench import report
from train.config import Config, parse
from train.data.batch import micro_batches
from train.distributed.world import StopSignal, World, start
from train.log import Silent
from train.models import make_model
from train.optim import has_fused_kernel
from train.precision import choose_precision
from train.timing import Clock, OwnWork
from train.trainer import Trainer

PUBLISHED = (  # images/s of one GPU, ResNet-50 at 224 px, mixed precision
    ("V100 16 GB", 1200, "NVIDIA DeepLearningExamples, DALI, NGC 21.03"),
    ("A100 80 GB", 2470, "NVIDIA DeepLearningExamples, DALI"),
    ("A100, 160 to 192 px", 3040, "ffcv-imagenet, derived from its 88 epochs"),
)


TARGET = 0.99  # ours / bare, images/s
# The C library keeps freed memory, for both loops: else a CPU step has tens of thousands of page faults, which differ
# from turn to turn by several percent.
KEPT = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}


def bare_loop(config: Config, world: World) -> Callable[[int], None]:
    """A function that runs the given number of minimal steps."""
    precision, device = choose_precision(config, world.device), world.device
    model = precision.cast(make_model(config.arch, 1000), device).train()
    fused = all(map(has_fused_kernel, model.parameters()))  # as ours
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4, fused=fused)
    scaler = torch.amp.GradScaler(device.type, enabled=precision.scaled)
    side = config.image_size
    images = torch.randn(config.batch_size, 3, side, side, device=device).contiguous(memory_format=precision.layout)
    labels = torch.arange(config.batch_size, device=device) % 1000

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            with precision.context(device):
                loss = functional.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return run


class Unmeasured(OwnWork):
    """Replaces the measurement of a rank's own work: does nothing."""

    def request(self) -> None:
        pass

    def arrive(self, waited: float) -> None:
        pass

    def computed(self) -> None:
        pass


def our_loop(trainer: Trainer, stop: StopSignal, measuring: type[OwnWork] = OwnWork) -> Callable[[int], None]:
    """A function that trains the given number of steps, including the line every ten steps."""
    trainer.model.train()
    trainer.log = Silent()
    # one epoch for all turns: its 1.28 million images are shuffled once, as in training
    clock = Clock(trainer.world.device, forward=True, kind=measuring)
    trainer.clock = clock
    batches = trainer.load()

    def train(steps: int) -> None:
        trainer.clock = clock
        for _ in range(steps):
            assert not stop.stopped()
            rate = trainer.train_step(micro_batches(batches))
            if trainer.progress.step % trainer.config.log_every == 0:
                trainer.end_interval(rate)

    return train


def timed(loop: Callable[[int], None], steps: int, device: torch.device) -> tuple[float, float]:
    """Wall and CPU seconds of `steps` steps, including work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin, used = time.perf_counter(), time.process_time()
    loop(steps)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin, time.process_time() - used


def compare(config: Config, steps: int, rounds: int) -> dict[str, Any]:
    """Both loops, alternating: images/s by wall and by CPU time, and their ratios per round."""
    world = start(config)
    trainer = Trainer(config, world)
    stop = StopSignal(world)
    loops = {
        "bare": bare_loop(config, world),
        "ours": our_loop(trainer, stop),
        "unmeasured": our_loop(trainer, stop, Unmeasured),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for turn in range(rounds + 1):  # the first is the warm-up
        for name in loops if turn % 2 else reversed(loops):
            took = timed(loops[name], steps, world.device)
            if turn:
                seconds[name].append(took)
    trainer.close()
    images = steps * config.batch_size
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "amp": trainer.precision.name,
    }
    for index, kind in enumerate(("wall time", "CPU time")):
        rates = {name: [images / took[index] for took in values] for name, values in seconds.items()}
        for name, other in (("ratio", "bare"), ("measuring", "unmeasured")):
            rates[name] = [ours / theirs for ours, theirs in zip(rates["ours"], rates[other], strict=True)]
        result[kind] = {name: report.summary(values) for name, values in rates.items()}
    return result


def main() -> None:
    """Prints both figures and their ratio."""
    gpu = torch.cuda.is_available()
    if not (gpu or KEPT.keys() <= os.environ.keys()):  # read by the C library when it starts
        os.execve(sys.executable, [sys.executable, "-m", "bench.step", *sys.argv[1:]], os.environ | KEPT)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=256 if gpu else 8)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20 if gpu else 1, help="per turn")
    parser.add_argument("--rounds", type=int, default=5 if gpu else 15)
    parser.add_argument("--amp", default="auto")
    parser.add_argument("--data", default="synthetic", help="with a data set, ours trains on one repeated batch of it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = parse(
        f"--data {options.data} --arch {options.arch} --batch-size {options.batch_size} --amp {options.amp} "
        f"--image-size {options.image_size} --epochs 1 --headspace --output /nonexistent".split()
    )
    head = report.machine() | {"torch": torch.__version__, "threads": torch.get_num_threads()}
    result = compare(config, options.steps, options.rounds)
    print(
        f"{options.arch} on {result['device']}, batch {options.batch_size}, amp {result['amp']}, "
        f"{options.rounds} turns of {options.steps} steps, load {head['load']}"
    )
    rows = [["images/s", "other loop", "ours", "ratio", "min", "max"]]
    for kind in ("wall time", "CPU time"):
        found = result[kind]
        spread = [f"{found['ratio'][key]:.3f}" for key in ("median", "min", "max")]
        rows.append([kind, f"{found['bare']['median']:.2f}", f"{found['ours']['median']:.2f}", *spread])
        own = result[kind]["measuring"]
        spread = [f"{own[key]:.4f}" for key in ("median", "min", "max")]
        rows.append([f"{kind}, ours without", f"{found['unmeasured']['median']:.2f}", "", *spread])
    met = result["wall time"]["ratio"]["median"] >= TARGET
    print(f"{report.table(rows)}\ntarget >= {TARGET}: {'met' if met else 'NOT MET'}")
    if gpu:
        for name, rate, source in PUBLISHED:
            print(f"  published {rate:9.1f}   {name}, {source}")
    if options.json:
        report.write(options.json, head | vars(options) | {"json": None} | result)


if __name__ == "__main__":
    main()
