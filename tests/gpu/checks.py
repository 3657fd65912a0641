"""The sections of bench/gpu.py. Each returns or yields rows: figures, and "ok": whether the trainer is correct, or
None if the row cannot fail.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu_scale import Figures, Rows, Scale
from tests.gpu import loading, machine, numerics, pretend, speed
from train.config import Config
from train.data.batch import Batch, Copy, Event, Request, Transfer
from train.data.decode import choose_decoder
from train.data.loader import Loader
from train.data.source import Pixels
from train.distributed.world import StopSignal, start
from train.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
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

    def place(self, index: int) -> None:
        pass


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


def amp(scale: Scale) -> Rows:
    """Mixed precision learns the digits as well as fp32, and synchronised batch norm as well as plain batch norm."""
    small = "--arch cifar_resnet20 --image-size 32 --val-resize 32"
    digits = f"--data {ROOT}/jobs/data/digits.tar {scale.pick(small, '')} --augment shift --flip 0 --batch-size 64"
    digits += " --epochs 10 --lr 0.4 --log-every 50 --no-tf32"
    levels = {level: f"--amp {level}" for level in ("none", "bf16", "fp16", "O2")} | {
        "syncbn": "--amp bf16 --syncbn custom"
    }
    found: dict[str, float] = {}
    for name, options in levels.items():
        found[name] = round(trained(scale, f"{digits} {options}")[-1]["top1"], 2)
        yield f"amp {name}", {"ok": scale.dry or found[name] >= found["none"] - LOST_POINTS, "top-1": found[name]}


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
    text = done.stdout + done.stderr
    return {
        "ok": done.returncode == 0,
        "exit code": done.returncode,
        "output": text if done.returncode else text[-300:],
    }


CHECKS: dict[str, Callable[[Scale], Figures]] = {
    "machine": machine.machine,
    "step": speed.step,
    "fp16": speed.fp16,
    "compile": speed.compiled,
    "graph": speed.graph,
    "autotune": speed.autotune,
    "files": loading.files,
    "slots": slots,
    "syncbn": numerics.syncbn,
    "ddp": numerics.ddp,
    "fsdp": numerics.fsdp,
    "fsdp_options": numerics.fsdp_options,
    "loss_scale": numerics.loss_scale,
    "ema": numerics.ema,
    "launcher": launcher,
    "channels_last": speed.channels_last,
    "options": speed.options,
    "short": speed.short,
}
SEVERAL: dict[str, Callable[[Scale], Rows]] = {
    "amp": amp,
    "batch": speed.batch,
    "profile": speed.profile,
    "loader": loading.loader,
    "decode_jpeg": loading.decode_jpeg,
}


def rows(name: str, dry: bool) -> Rows:
    """Yield the rows of a section; on a simulated GPU if `dry`."""
    scale = Scale(dry)
    with pretend.gpu() if dry else nullcontext():
        if name in CHECKS:
            yield name, CHECKS[name](scale)
        else:
            yield from SEVERAL[name](scale)
    gc.collect()
    torch.cuda.empty_cache()  # the next one measures its own peak
