"""Measure the cost of a batch on this machine: a*B + b seconds, fitted by least squares."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from train.errors import TrainError
from train.experiments.dual_batch.plan import Cost
from train.models import make_model


@dataclass(frozen=True)
class Timing:
    """A batch size and its median batch time."""

    batch: int
    seconds: float


def fit(timings: Sequence[Timing]) -> Cost:
    """Fit a line through the points.

    Raises:
        TrainError: fewer than two batch sizes, or a or b is not positive, because the times are too noisy.
    """
    if len({timing.batch for timing in timings}) < 2:
        raise TrainError("--batches: at least two batch sizes are needed")
    sizes = np.array([[timing.batch, 1.0] for timing in timings])
    (a, b), *_ = np.linalg.lstsq(sizes, np.array([timing.seconds for timing in timings]), rcond=None)
    if not (a > 0 and b > 0):
        raise TrainError(
            f"the times give {a:.3g} s per sample and {b:.3g} s per batch: both must be greater than 0; use more "
            f"--repeats, add smaller batches, and stop other programs"
        )
    return Cost(float(a), float(b))


def measure(
    arch: str, classes: int, side: int, batches: Sequence[int], repeats: int, device: torch.device
) -> list[Timing]:
    """Measure training steps of `arch`; batch sizes alternate, so that a slow phase of the machine affects all."""
    model = make_model(arch, classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(max(batches), 3, side, side, device=device)
    labels = torch.arange(max(batches), device=device) % classes

    def step(batch: int) -> float:
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(images[:batch]), labels[:batch]).backward()  # type: ignore[no-untyped-call]  # torch's stub
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for batch in batches:
        step(batch)
    rounds = [[step(batch) for batch in batches] for _ in range(repeats)]
    return [
        Timing(batch, float(np.median(times))) for batch, times in zip(batches, zip(*rounds, strict=True), strict=True)
    ]
