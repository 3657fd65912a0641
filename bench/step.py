"""What our loop costs over the least that PyTorch needs: images/s of both, same model, batch and precision, in one run.

    python bench/step.py [--arch resnet50] [--batch-size 256] [--steps 20] [--rounds 5] [--json FILE]

The bare loop has no loader, schedule, metrics or checks: a fixed batch on the device, forward, backward, SGD. Ours is
the trainer's own step with its repeated batch (what --headspace trains on), with normalisation, metrics, schedule and
the stop flag. The two take turns, and medians are compared, so that a shared or heating machine does not favour one.
On a GPU, the published ResNet-50 figures stand beside.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from train.config import Config, parse  # noqa: E402
from train.data.sampler import fold  # noqa: E402
from train.metrics import Meter  # noqa: E402
from train.models import seeded_model  # noqa: E402
from train.objective import draw_mix  # noqa: E402
from train.parallel.world import StopSignal, World, start  # noqa: E402
from train.precision import choose_precision  # noqa: E402
from train.setup import Run, prepare  # noqa: E402
from train.step import Plan  # noqa: E402

PUBLISHED = (  # images/s of one GPU, ResNet-50 at 224 px, mixed precision
    ("V100 16 GB", 1200, "NVIDIA DeepLearningExamples, DALI, NGC 21.03"),
    ("A100 80 GB", 2470, "NVIDIA DeepLearningExamples, DALI"),
    ("A100, 160 to 192 px", 3040, "ffcv-imagenet, derived from its 88 epochs"),
)


@dataclass(frozen=True)
class Result:
    """Medians over the rounds."""

    device: str
    arch: str
    batch: int
    amp: str
    bare: float  # images/s
    ours: float  # images/s
    ratio: float  # ours to bare


def bare_loop(config: Config, world: World) -> Callable[[int], None]:
    """`steps` -> runs that many steps of the least there is."""
    precision, device = choose_precision(config, world.device), world.device
    model = precision.cast(seeded_model(config.arch, 1000, 0), device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
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


def our_loop(run: Run, stop: StopSignal) -> Callable[[int], None]:
    """`steps` -> runs that many steps as `train.loop` does, down to the line every ten steps."""
    from train.loop import requests

    run.model.train()

    def go(steps: int) -> None:
        meter = Meter(run.world)
        batches = run.train_loader.batches(requests(run), 0)
        for step in range(steps):
            assert not stop.agreed()
            torch.manual_seed(fold(0, step))
            plan = Plan(run.schedule(step), step, draw_mix(run.config, step, run.config.image_size))
            meter.add(run.step.accumulate(next(batches), plan))
            run.step.update(plan)
            if (step + 1) % run.config.log_every == 0:
                meter.read(0.0)

    return go


def timed(loop: Callable[[int], None], steps: int, device: torch.device) -> float:
    """Seconds of `steps` steps, the device's queue included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    loop(steps)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def compare(config: Config, steps: int, rounds: int) -> Result:
    """Both loops, turn by turn."""
    world = start(config)
    run = prepare(config, world)
    loops = {"bare": bare_loop(config, world), "ours": our_loop(run, StopSignal(world))}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds + 1):  # the first is the warm-up
        for name in loops if turn % 2 else reversed(loops):
            took = timed(loops[name], steps, world.device)
            if turn:
                seconds[name].append(took)
    run.train_loader.close()
    run.val_loader.close()
    rate = {name: steps * config.batch_size / statistics.median(values) for name, values in seconds.items()}
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    ratio = rate["ours"] / rate["bare"]
    return Result(device, config.arch, config.batch_size, run.precision.name, rate["bare"], rate["ours"], ratio)


def main() -> None:
    """Prints both figures and their ratio."""
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=256 if gpu else 8)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--steps", type=int, default=20 if gpu else 2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--amp", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = parse(
        f"--data synthetic --arch {options.arch} --batch-size {options.batch_size} --amp {options.amp} "
        f"--image-size {options.image_size} --epochs 1 --output /nonexistent".split()
    )
    result = compare(config, options.steps, options.rounds)
    print(f"{result.arch} on {result.device}, batch {result.batch}, amp {result.amp}, images/s:")
    print(f"  bare loop {result.bare:9.1f}\n  ours      {result.ours:9.1f}   ratio {result.ratio:.3f}")
    if gpu:
        for name, rate, source in PUBLISHED:
            print(f"  published {rate:9.1f}   {name}, {source}")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, **asdict(result)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
