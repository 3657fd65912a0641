"""Experiment 3's table: synchronised batch norm over channels x batch, time and memory per process.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m bench.syncbn [--json FILE]
    launcher up jobs/e3_grid_bed.yaml

Inputs are (B, C), as published, or images with --side. Forward and `outputs.sum().backward()` of one warmed-up layer;
starting processes is not included. Variants alternate.
custom: train/experiments/syncbn.py over all ranks. On GPUs it is compared with library (torch's); on CPU, where that
does not work, with whole: torch's plain batch norm of all ranks' batches in one process, the same result without
communication.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.report import machine, table
from train.__main__ import leave
from train.config import Config
from train.distributed.world import World, start
from train.experiments.syncbn import SyncBatchNorm

CHANNELS, BATCHES = (128, 256, 512, 1024), (32, 64)
Layer = Callable[[Tensor], Tensor]


def step(layer: Layer, x: Tensor, cuda: bool) -> float:
    """Seconds of one forward and backward."""
    x.grad = None
    begun = time.perf_counter()
    layer(x).sum().backward()  # type: ignore[no-untyped-call]
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def memory(layer: Layer, x: Tensor, cuda: bool) -> float:
    """Peak MiB that forward and backward need in addition to their input, in this process."""
    x.grad = None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(layer, x, cuda)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL(None).malloc_trim(0)  # return memory freed by earlier cells, or its reuse would not be counted
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
    before = _status("VmRSS")
    step(layer, x, cuda)
    return max(_status("VmHWM") - before, 0) / 2**10


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def cell(world: World, channels: int, batch: int, side: int, repeats: int) -> dict[str, Any]:
    """Both variants at one size: medians over steps, maxima over ranks."""
    cuda = world.device.type == "cuda"
    torch.manual_seed(world.rank)
    shape, plain = ((side, side), nn.BatchNorm2d) if side else ((), nn.BatchNorm1d)
    mine = torch.randn(batch, channels, *shape, device=world.device, requires_grad=True)
    pairs: dict[str, tuple[Layer, Tensor]] = {"custom": (SyncBatchNorm(channels).to(world.device), mine)}
    if cuda:
        pairs["library"] = (nn.SyncBatchNorm(channels).to(world.device), mine)
    else:
        whole = torch.randn(batch * world.size, channels, *shape, requires_grad=True)
        pairs["whole"] = (plain(channels), whole)
    times: dict[str, list[float]] = {name: [] for name in pairs}
    peaks = {}
    for name, (layer, x) in pairs.items():
        if name == "whole" and not world.first:
            continue
        step(layer, x, cuda)
        peaks[name] = memory(layer, x, cuda)
    for _ in range(repeats):
        for name, (layer, x) in pairs.items():
            if world.size > 1:
                dist.barrier()
            if name != "whole" or world.first:  # the reference is one process; the others wait at the barrier
                times[name].append(step(layer, x, cuda))
    found: dict[str, Any] = {"channels": channels, "batch": batch}
    for name in pairs:
        result = torch.tensor([statistics.median(times[name]) * 1e3, peaks[name]] if times[name] else [0.0, 0.0])
        if world.size > 1:
            dist.all_reduce(result, dist.ReduceOp.MAX)
        found[name] = {"ms": round(float(result[0]), 2), "mib": round(float(result[1]), 1)}
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--channels", type=int, nargs="+", default=CHANNELS)
    options.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="per process")
    options.add_argument("--side", type=int, default=0, help="of images (B, C, side, side); 0: inputs are (B, C)")
    options.add_argument("--repeats", type=int, default=15)
    output = os.environ.get("LAUNCHER_OUTPUT", "")
    options.add_argument("--json", type=Path, default=Path(output) / "syncbn.json" if output else None)
    given = options.parse_args()
    world = start(Config(data=""))
    cells = [cell(world, c, b, given.side, given.repeats) for b in given.batches for c in given.channels]
    if not world.first:
        return
    other = "library" if "library" in cells[0] else "whole"
    rows = [("C", "B", "custom ms", f"{other} ms", "ratio", "custom MiB", f"{other} MiB", "custom KiB/(B x C)")]
    for found in cells:
        ours, theirs = found["custom"], found[other]
        size = found["channels"] * found["batch"]
        rows.append(
            (
                str(found["channels"]),
                str(found["batch"]),
                f"{ours['ms']:.2f}",
                f"{theirs['ms']:.2f}",
                f"{ours['ms'] / theirs['ms']:.2f}",
                f"{ours['mib']:.1f}",
                f"{theirs['mib']:.1f}",
                f"{ours['mib'] * 1024 / size:.2f}",
            )
        )
    shape = f"(B, C, {given.side}, {given.side})" if given.side else "(B, C)"
    print(f"{world.size} processes, inputs {shape}, custom against {other}")
    print(table(rows), flush=True)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"machine": machine(), "cells": cells}, indent=2) + "\n")


if __name__ == "__main__":
    main()
    leave(0)
