"""What a run measured, read from its metrics.jsonl: how it worked, how fast, how well it learnt, how far it is."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from launcher.errors import RunUnknown
from launcher.job.scalars import duration
from launcher.records.paths import RunPaths
from launcher.records.store import read_json_lines

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Measured:
    """One run. Accuracies are percent, None where nothing was validated."""

    run: str
    label: str  # its name in a comparison (records.groups.labels)
    method: str  # single, ddp, ...
    devices: int  # workers at the same training: processes, or replicas inside one
    batch: int  # images a step, of all workers
    images_per_s: float
    accuracy: float | None = None  # validation, at the end
    best: float | None = None  # validation, highest of all epochs
    train_accuracy: float | None = None  # of the last epoch
    seconds: float | None = None  # of the whole training; None where it did not end
    epochs: int = 0
    arch: str = ""
    losses: tuple[tuple[float, float], ...] = field(default=(), repr=False)  # (seconds since the start, training loss)
    memory_mb: float | None = None  # the most that a process or its GPU needed
    mfu: float | None = None  # share of what the GPUs could compute in the time, 0 to 1

    @property
    def seconds_per_batch(self) -> float:
        return self.batch / self.images_per_s


@dataclass(frozen=True)
class TrainingProgress:
    """How far a training is, from two lines of kind "step": an early one, for the pace, and the latest."""

    first: Line
    last: Line

    @property
    def eta(self) -> float | None:
        """Seconds until the last step at the pace between the two lines; None where that cannot be known."""
        step, steps, time = (number(self.last.get(key)) for key in ("step", "steps", "time"))
        first_step, first_time = (number(self.first.get(key)) for key in ("step", "time"))
        if step is None or steps is None or time is None or first_step is None or first_time is None:
            return None
        if step <= first_step or time <= first_time:
            return None
        return (time - first_time) / (step - first_step) * max(0.0, steps - step)

    @property
    def slow(self) -> str:
        """The rank that is persistently slow, with node and kind; "" if none is, or the program does not say it."""
        text = self.last.get("slow")
        return "".join(char for char in text[:200] if char.isprintable()) if isinstance(text, str) else ""

    def parts(self) -> list[str]:
        """What a person is shown of it: `epoch 2/6`, `step 7/9`, `910 images/s`, `ETA 0:12`, ..."""
        speed, loss, wait = (number(self.last.get(key)) for key in ("images_per_s", "loss", "data_wait"))
        shown = [
            self._of("epoch", "epochs"),
            self._of("step", "steps"),
            None if speed is None else f"{speed:,.0f} images/s",
            f"ETA {duration(eta)}" if (eta := self.eta) else None,
            None if loss is None else f"loss {loss:.4g}",
            None if wait is None else f"data wait {wait:.0%}",
        ]
        return [part for part in shown if part]

    def _of(self, now: str, last: str) -> str | None:
        value, end = self.last.get(now), self.last.get(last)
        if number(value) is None:
            return None
        return f"{now} {value}" if number(end) is None else f"{now} {value}/{end}"


def training_progress(lines: Sequence[Line]) -> TrainingProgress | None:
    """From lines of a metrics.jsonl in order; None without a step. A restart begins a new pace."""
    steps = [line for line in lines if line.get("kind", "step") == "step" and number(line.get("step")) is not None]
    if not steps:
        return None
    first = steps[0]
    for before, after in pairwise(steps):
        if (number(after["step"]) or 0) <= (number(before["step"]) or 0):
            first = after
    return TrainingProgress(first, steps[-1])


def number(value: object) -> float | None:
    """None for anything else: the file belongs to the user's program, which may write NaN or text."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e15:
        return None
    return float(value)


def top1(epoch: Line) -> float | None:
    """Validation accuracy in percent, from an epoch's line; None where it has none."""
    val = epoch.get("val")
    return number(val.get("top1")) if isinstance(val, Mapping) else None


def read(paths: RunPaths, label: str) -> Measured:
    """The run's figures. Raises RunUnknown where it left none."""
    if not paths.metrics.exists():
        raise _nothing(paths.run, "has no metrics.jsonl here")
    try:
        return measure(read_json_lines(paths.metrics), paths.run, label)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise _nothing(paths.run, "has a metrics.jsonl that is not as the trainer writes it") from error


def measure(lines: Iterable[Line], run: str, label: str) -> Measured:
    """From the lines of a metrics.jsonl. A resumed run has several starts; the last one has the settings.

    Raises RunUnknown where there is no start or not one step.
    """
    lines = [line for line in lines if "kind" in line]
    kinds = ("start", "step", "epoch", "end")
    starts, steps, epochs, ends = ([line for line in lines if line["kind"] == kind] for kind in kinds)
    ends = [line for line in ends if "top1" in line]
    if not starts or not steps:
        raise _nothing(run, "measured nothing: it has no step in metrics.jsonl")
    start = starts[-1]
    world = int(start["world"])
    devices = int(start.get("devices", world))
    memory = [value for epoch in epochs if (value := number(epoch.get("memory_mb"))) is not None]
    mfu = [value for step in steps if (value := number(step.get("mfu"))) is not None]
    return Measured(
        run=run,
        label=label,
        method=start.get("parallel") or ("ddp" if world > 1 else "single"),
        devices=devices,
        batch=int(start["global_batch"]),
        images_per_s=steady_rate(lines),
        accuracy=epochs[-1]["val"]["top1"] if epochs else None,
        best=max((epoch["val"]["top1"] for epoch in epochs), default=None),
        train_accuracy=epochs[-1]["train"]["top1"] if epochs else None,
        memory_mb=max(memory, default=None),
        mfu=statistics.median(mfu) if mfu else None,
        seconds=sum(end["seconds"] for end in ends) if ends else None,
        epochs=len({epoch["epoch"] for epoch in epochs}),
        arch=str(start.get("arch", "")),
        losses=_losses(lines),
    )


def steady_rate(lines: Sequence[Line]) -> float:
    """Images a second over all intervals but each start's first, which pays for warming up, if there are others.

    Intervals count by their steps: the rate is all images over all their seconds, not the mean of rates.
    """
    warm: list[tuple[int, float]] = []
    cold: list[tuple[int, float]] = []
    last, fresh = 0, True
    for line in lines:
        if line["kind"] == "start":
            last, fresh = int(line.get("step", 0)), True
        elif line["kind"] == "step":
            (cold if fresh else warm).append((int(line["step"]) - last, float(line["images_per_s"])))
            last, fresh = int(line["step"]), False
    counted = warm or cold
    return sum(steps for steps, _ in counted) / sum(steps / rate for steps, rate in counted)


def _losses(lines: Sequence[Line]) -> tuple[tuple[float, float], ...]:
    """The time between an end and the next start does not count."""
    points: list[tuple[float, float]] = []
    passed = since = 0.0
    for line in lines:
        if line["kind"] == "start":
            passed, since = (points[-1][0] if points else 0.0), line["time"]
        elif line["kind"] == "step":
            points.append((passed + line["time"] - since, float(line["loss"])))
    return tuple(points)


def _nothing(run: str, what: str) -> RunUnknown:
    return RunUnknown(run, what, f"fetch it: launcher fetch {run}; or look at why it ended: launcher status {run}")
