"""What the launcher's trainer measured in a run, from its metrics.jsonl: method, speed and accuracy."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from launcher.errors import RunUnknown
from launcher.records.measured import Line, number
from launcher.records.paths import RunPaths
from launcher.records.store import read_json_lines


@dataclass(frozen=True)
class Measured:
    """Measurements of one run. Accuracies are percent, None without validation."""

    run: str
    label: str  # its name in a comparison (records.groups.labels)
    method: str  # single, ddp, ...
    devices: int  # workers of this training: processes, or replicas in one process
    batch: int  # images per step of all workers
    images_per_s: float
    accuracy: float | None = None  # validation, at the end
    best: float | None = None  # validation, highest of all epochs
    train_accuracy: float | None = None  # of the last epoch
    seconds: float | None = None  # of the training; None if it did not finish
    epochs: int = 0
    arch: str = ""
    losses: tuple[tuple[float, float], ...] = field(default=(), repr=False)  # (seconds since the start, training loss)
    memory_mb: float | None = None  # maximum of a process or its GPU
    mfu: float | None = None  # model FLOPs utilization, 0 to 1
    gradients: str = ""  # how they are compressed; "" as they are

    @property
    def seconds_per_batch(self) -> float:
        return self.batch / self.images_per_s


def read(paths: RunPaths, label: str) -> Measured:
    """Return the measurements of a run. Raises RunUnknown if there are none."""
    try:
        return measure(read_json_lines(paths.metrics), paths.run, label)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise _nothing(paths.run, "its metrics.jsonl does not have the format of the trainer") from error


def measure(lines: Iterable[Line], run: str, label: str) -> Measured:
    """Return the measurements from the lines of a metrics.jsonl. Settings are those of the last start.

    Raises RunUnknown if there is no start or no step.
    """
    lines = [line for line in lines if "kind" in line]
    kinds = ("start", "step", "epoch", "end")
    starts, steps, epochs, ends = ([line for line in lines if line["kind"] == kind] for kind in kinds)
    ends = [line for line in ends if "top1" in line]
    if not starts or not steps:
        raise _nothing(run, "its metrics.jsonl has no training step")
    start = starts[-1]
    world = int(start["world"])
    devices = int(start.get("devices", world))
    memory = [value for epoch in epochs if (value := number(epoch.get("memory_mb"))) is not None]
    mfu = [value for step in steps if (value := number(step.get("mfu"))) is not None]
    accuracies = [value for epoch in epochs if (value := number(epoch["val"]["top1"])) is not None]
    rate, method = steady_rate(lines), start.get("parallel")
    if devices < 1 or not 0 < rate < float("inf"):
        raise ValueError(f"{devices} devices, {rate} images per second")
    return Measured(
        run=run,
        label=label,
        method=method if isinstance(method, str) and method else "ddp" if world > 1 else "single",
        devices=devices,
        batch=int(start["global_batch"]),
        images_per_s=rate,
        accuracy=number(epochs[-1]["val"]["top1"]) if epochs else None,
        best=max(accuracies, default=None),
        train_accuracy=number(epochs[-1]["train"]["top1"]) if epochs else None,
        memory_mb=max(memory, default=None),
        mfu=statistics.median(mfu) if mfu else None,
        gradients=_compressed(start),
        seconds=sum(float(end["seconds"]) for end in ends) if ends else None,
        epochs=len({epoch["epoch"] for epoch in epochs}),
        arch=str(start.get("arch", "")),
        losses=_losses(lines),
    )


def _compressed(start: Line) -> str:
    config = start.get("config")
    found = config.get("gradient_compression") if isinstance(config, dict) else None
    return found if isinstance(found, str) and found != "none" else ""


def steady_rate(lines: Sequence[Line]) -> float:
    """Return images per second, without intervals that compile and the first after each start, if there are others.

    Intervals are weighted by their steps: total images divided by total seconds, not the mean of rates.
    """
    warm: list[tuple[int, float]] = []
    cold: list[tuple[int, float]] = []
    last, fresh = 0, True
    for line in lines:
        if line["kind"] == "start":
            last, fresh = int(line.get("step", 0)), True
        elif line["kind"] == "step":
            (cold if fresh or line.get("compiled") else warm).append(
                (int(line["step"]) - last, float(line["images_per_s"]))
            )
            last, fresh = int(line["step"]), False
    counted = warm or cold
    return sum(steps for steps, _ in counted) / sum(steps / rate for steps, rate in counted)


def _losses(lines: Sequence[Line]) -> tuple[tuple[float, float], ...]:
    """Return training seconds and loss of each step, without the time between an end and the next start."""
    points: list[tuple[float, float]] = []
    passed = since = 0.0
    for line in lines:
        if line["kind"] == "start":
            passed, since = (points[-1][0] if points else 0.0), line["time"]
        elif line["kind"] == "step":
            points.append((passed + line["time"] - since, float(line["loss"])))
    return tuple(points)


def _nothing(run: str, what: str) -> RunUnknown:
    return RunUnknown(run, what, f"run: launcher fetch {run}; or see why it ended: launcher status {run}")
