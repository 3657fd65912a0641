"""Progress of a run, from the lines of its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from launcher.job.scalars import duration

Line = Mapping[str, Any]


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a training, from two lines of kind "step": the first, for the speed, and the latest."""

    first: Line
    last: Line

    @property
    def eta(self) -> float | None:
        """Seconds until the last step at the speed between the two lines; None if unknown."""
        step, steps, time = (number(self.last.get(key)) for key in ("step", "steps", "time"))
        first_step, first_time = (number(self.first.get(key)) for key in ("step", "time"))
        if step is None or steps is None or time is None or first_step is None or first_time is None:
            return None
        if step <= first_step or time <= first_time:
            return None
        return (time - first_time) / (step - first_step) * max(0.0, steps - step)

    @property
    def slow(self) -> str:
        """The persistently slow rank with node and kind; "" if none is slow or the program does not report it."""
        text = self.last.get("slow")
        return "".join(char for char in text[:200] if char.isprintable()) if isinstance(text, str) else ""

    def parts(self) -> list[str]:
        """Return the parts of a status line: `epoch 2/6`, `step 7/9`, `910 images/s`, `ETA 0:12`, ..."""
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
    """Return the progress from the lines of a metrics.jsonl; None without a step. A restart resets the speed."""
    steps = [line for line in lines if line.get("kind", "step") == "step" and number(line.get("step")) is not None]
    if not steps:
        return None
    first = steps[0]
    for before, after in pairwise(steps):
        if (number(after["step"]) or 0) <= (number(before["step"]) or 0):
            first = after
    return TrainingProgress(first, steps[-1])


def number(value: object) -> float | None:
    """Return the value if it is a finite number, else None: the user's program may write NaN or text."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e15:
        return None
    return float(value)


def top1(epoch: Line) -> float | None:
    """Return the validation accuracy in percent from an epoch's line; None if it has none."""
    val = epoch.get("val")
    return number(val.get("top1")) if isinstance(val, Mapping) else None
