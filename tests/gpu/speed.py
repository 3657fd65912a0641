"""The rows of bench/gpu.py about a step of ResNet-50: precision, batch, compiled, as a CUDA graph, its kernels."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import profiler
from torch.nn import functional

from bench.gpu_scale import Figures, Rows, Scale
from bench.step import PUBLISHED, TARGET, compare, our_loop, timed
from tests.train.steps import accumulate
from train.config import Config
from train.data.batch import Batch, Request
from train.distributed.world import StopSignal, World
from train.hardware import device_name, ideal_seconds, peak_memory
from train.models import make_model
from train.optim import has_fused_kernel
from train.precision import choose_precision
from train.step import Plan
from train.trainer import Trainer

SYNTHETIC = "--data synthetic --headspace --epochs 1 --output /nonexistent"
Loop = Callable[[int], None]  # runs so many steps
KERNELS, RECORDED = 20, 3
BATCH_NORM = re.compile(r"batch_?norm|\bbn_|_bn_|bnorm", re.IGNORECASE)


def step(scale: Scale) -> Figures:
    """Our loop compared with a bare one, and its peak memory and share of the GPU's peak performance."""
    config, device = scale.options(SYNTHETIC), scale.world().device
    result = compare(config, *scale.pick((10, 5), (1, 1)))
    found = result["wall time"]
    ideal = ideal_seconds(make_model(config.arch, 1000), config.image_size, device_name(device), result["amp"], True)
    rate, ratio = found["ours"]["median"], found["ratio"]["median"]
    return {
        "ok": scale.dry or ratio >= TARGET,
        "device": device_name(device),
        "torch": torch.__version__,
        "amp": result["amp"],
        "images/s": round(rate, 1),
        "bare images/s": round(found["bare"]["median"], 1),
        "ratio": ratio,
        "CPU time of a step": f"{1000 * config.batch_size / result['CPU time']['ours']['median']:.1f} ms",
        **({"MFU": f"{rate * ideal:.1%}"} if ideal else {}),
        "peak MB": round(peak_memory(device), 1),
        "published": [f"{published} images/s, {name}, {source}" for name, published, source in PUBLISHED],
    }


class Bare:
    """A minimal loop on a fixed batch on the device, like `bench.step.bare_loop`, whose step can be changed."""

    def __init__(self, config: Config, world: World, mode: str = "", reads: bool = False) -> None:
        """`mode`: of torch.compile, if any; `reads`: the host reads the loss of each step, so it waits for the GPU."""
        self.precision, self.device, self._reads = choose_precision(config, world.device), world.device, reads
        model = self.precision.cast(make_model(config.arch, 1000), self.device).train()
        fused = all(map(has_fused_kernel, model.parameters()))
        self.optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=1e-4, fused=fused)
        self.model: Any = torch.compile(model, dynamic=False, mode=mode) if mode else model
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision.scaled)
        shape = (config.batch_size, 3, config.image_size, config.image_size)
        self.images = torch.randn(shape, device=self.device).contiguous(memory_format=self.precision.layout)
        self.labels = torch.arange(config.batch_size, device=self.device) % 1000

    def step(self) -> None:
        """Update the weights. With a loss scale, found_inf stays on the GPU: the fused update takes it."""
        self.optimizer.zero_grad()
        with self.precision.context(self.device):
            loss = functional.cross_entropy(self.model(self.images), self.labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self._reads:
            loss.item()

    def __call__(self, steps: int) -> None:
        for _ in range(steps):
            self.step()


def alternating(scale: Scale, loops: dict[str, Loop], images: int) -> dict[str, float]:
    """Return images/s of each loop, in three turns of ten steps after five."""
    device, (first, steps, rounds) = scale.world().device, scale.pick((5, 10, 3), (1, 1, 1))
    found: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        timed(loop, first, device)
    for _ in range(rounds):
        for name, loop in loops.items():
            found[name].append(steps * images / timed(loop, steps, device)[0])
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


class Ours:
    """Our step with each variant's options; a context, which closes the trainers."""

    def __init__(self, scale: Scale, variants: dict[str, str], data: str = SYNTHETIC) -> None:
        self._scale, self._world, self.runs = scale, scale.world(), dict[str, Trainer]()
        for name, options in variants.items():
            self.runs[name] = Trainer(scale.options(f"{data} {options}"), self._world)
        self.loops = {name: our_loop(run, StopSignal(self._world)) for name, run in self.runs.items()}

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self.runs.values():
            run.close()

    def rates(self) -> dict[str, float]:
        """Return images/s of each, alternating."""
        images = {run.config.batch_size for run in self.runs.values()}
        found = alternating(self._scale, self.loops, images.pop())
        assert not images
        for run in self.runs.values():
            assert all(bool(parameter.isfinite().all()) for parameter in run.model.parameters())
        return found


def rates(scale: Scale, variants: dict[str, str]) -> dict[str, float]:
    """Return images/s of our step with each variant's options, alternating."""
    with Ours(scale, variants) as ours:
        return ours.rates()


def fp16(scale: Scale) -> Figures:
    """fp16 beside bf16. Ours reads on the host whether a gradient overflowed; the bare loop does not, unless told."""
    world, base = scale.world(), scale.options(SYNTHETIC)
    half = scale.options(f"{SYNTHETIC} --amp fp16")
    with Ours(scale, {"ours bf16": "", "ours fp16": "--amp fp16"}) as ours:
        loops: dict[str, Loop] = {
            **ours.loops,
            "bare bf16": Bare(base, world),
            "bare bf16 with a read": Bare(base, world, reads=True),
            "bare fp16": Bare(half, world),
            "bare fp16 with a read": Bare(half, world, reads=True),
        }
        return {"ok": None, **alternating(scale, loops, base.batch_size)}


def batch(scale: Scale) -> Rows:
    """Larger batches."""
    for size in scale.pick((512, 1024), (64, 128)):
        with Ours(scale, {"images/s": f"--batch-size {size}"}) as ours:
            device = scale.world().device
            torch.cuda.reset_peak_memory_stats(device)
            yield f"batch {size}", {"ok": None, **ours.rates(), "peak MB": round(peak_memory(device), 1)}


def compiled(scale: Scale) -> Figures:
    """torch.compile works with our step."""
    with Ours(scale, {"plain": "", "compiled": "--compile"}) as ours:
        first = timed(ours.loops["compiled"], 1, scale.world().device)[0]
        found = ours.rates()
    torch.compiler.reset()
    ratio = round(found["compiled"] / found["plain"], 3)
    return {"ok": scale.dry or ratio >= 0.95, "ratio": ratio, **found, "first step": f"{first:.1f} s"}


def autotune(scale: Scale) -> Figures:
    """A bare loop with the mode that tries more kernels."""
    world, config = scale.world(), scale.options(SYNTHETIC)
    tuned = Bare(config, world, mode="max-autotune-no-cudagraphs")
    first = timed(tuned, 1, world.device)[0]
    loops: dict[str, Loop] = {"plain": Bare(config, world), "max-autotune-no-cudagraphs": tuned}
    found = alternating(scale, loops, config.batch_size)
    torch.compiler.reset()
    return {"ok": None, **found, "first step": f"{first:.1f} s"}


def graph(scale: Scale) -> Figures:
    """A bare loop whose whole step is one CUDA graph, which costs the host one call."""
    world, config = scale.world(), scale.options(SYNTHETIC)
    plain, bare = Bare(config, world), Bare(config, world)
    aside = torch.cuda.Stream(world.device)
    aside.wait_stream(torch.cuda.current_stream(world.device))
    with torch.cuda.stream(aside):  # a capture needs all memory and all algorithms to be chosen
        bare(3)
    torch.cuda.current_stream(world.device).wait_stream(aside)
    captured = torch.cuda.CUDAGraph()
    bare.optimizer.zero_grad()
    with torch.cuda.graph(captured):
        bare.step()

    def replay(steps: int) -> None:
        for _ in range(steps):
            captured.replay()

    before = [parameter.detach().clone() for parameter in bare.model.parameters()]
    loops: dict[str, Loop] = {"plain": plain, "graph": replay}
    found = alternating(scale, loops, config.batch_size)
    finite = all(bool(parameter.isfinite().all()) for parameter in bare.model.parameters())
    moved = any(not torch.equal(a, b) for a, b in zip(before, bare.model.parameters(), strict=True))
    ratio = round(found["graph"] / found["plain"], 3)
    return {"ok": scale.dry or (finite and moved), "ratio": ratio, **found}


def profile(scale: Scale) -> Rows:
    """The kernels of our step: which take most of the time, and which batch norm runs."""
    for amp in ("bf16", "fp16"):
        with Ours(scale, {amp: f"--amp {amp}"}) as ours:
            yield f"profile {amp}", kernels(scale, ours.loops[amp])


def kernels(scale: Scale, loop: Loop) -> Figures:
    """Return the time of each kernel in a step, of RECORDED steps."""
    device = scale.world().device
    steps = scale.pick(10, 1)
    timed(loop, scale.pick(5, 1), device)
    wall = timed(loop, steps, device)[0] / steps
    activities = [profiler.ProfilerActivity.CPU, *scale.pick([profiler.ProfilerActivity.CUDA], [])]
    with profiler.profile(activities=activities) as recorded:
        timed(loop, RECORDED, device)
    wanted = scale.pick(torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU)
    field = scale.pick("self_device_time_total", "self_cpu_time_total")
    found = [
        (getattr(event, field) / RECORDED / 1000, event.count / RECORDED, event.key)
        for event in recorded.key_averages()
        if event.device_type == wanted and not event.is_user_annotation
    ]
    found.sort(reverse=True)
    total = sum(took for took, _, _ in found)
    norms = sum(took for took, _, name in found if BATCH_NORM.search(name))
    return {
        "ok": scale.dry or bool(found),
        "ms of a step": round(1000 * wall, 2),
        "ms of its kernels": round(total, 2),
        "kernels": round(sum(calls for _, calls, _ in found)),
        "ms of batch norm": round(norms, 2),
        "batch norm": [line(each) for each in found if BATCH_NORM.search(each[2])],
        "top": [line(each) for each in found[:KERNELS]],
    }


def line(kernel: tuple[float, float, str]) -> str:
    took, calls, name = kernel
    return f"{took:7.3f} ms {calls:6.1f} x  {name}"


def channels_last(scale: Scale) -> Figures:
    """The layout for tensor cores is not slower than the other one."""
    names = ("contiguous", "channels_last")
    found = rates(scale, {name: f"--memory-format {name}" for name in names})
    ratio = round(found["channels_last"] / found["contiguous"], 3)
    return {"ok": scale.dry or ratio >= 1, "ratio": ratio, **found}


def options(scale: Scale) -> Figures:
    """Cost of a step with synchronised batch norm, averaged weights and LARS; cannot fail."""
    variants = {"plain": "", "syncbn": "--syncbn custom", "ema": "--ema-decay 0.999", "lars": "--optimizer lars"}
    found = rates(scale, variants)
    return {"ok": None, **{name: round(rate / found["plain"], 3) for name, rate in found.items() if name != "plain"}}


def short(scale: Scale) -> Figures:
    """A short batch does not slow down the later full batches of a compiled model."""
    world = scale.world()
    with Ours(scale, {"compiled": "--compile"}) as ours:
        run, loop = ours.runs["compiled"], ours.loops["compiled"]
        images = run.config.batch_size
        steps = scale.pick(10, 1)
        timed(loop, scale.pick(5, 1), world.device)
        before = min(timed(loop, steps, world.device)[0] for _ in range(3))
        full = next(iter(run.train_loader.batches([Request(np.arange(images), images)], 0)))
        begin = time.perf_counter()
        for count in (images - 3, images - 5):
            short = Batch(full.images[:count], full.labels[:count], full.weights[:count], count, last=True)
            accumulate(run.step, short, Plan(0.01, 0))
            run.step.update(Plan(0.01, 0))
        took = time.perf_counter() - begin
        after = min(timed(loop, steps, world.device)[0] for _ in range(3))
    kept = round(before / after, 3)
    return {"ok": scale.dry or kept >= 0.95, "after short batches": kept, "their compilation": f"{took:.1f} s"}
