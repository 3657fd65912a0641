"""Runs side by side: speed-up, efficiency and the share of a step that works in parallel, as pure arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.records.measured import Measured


@dataclass(frozen=True)
class Row:
    """One run against its baseline. None where there is nothing to say: the baseline itself, or equal devices."""

    measured: Measured
    against: str | None  # the baseline's run
    same_batch: bool  # whether the baseline did equal global batches
    speed_up: float | None
    efficiency: float | None  # of the devices that were added: 1 is all of them
    parallel: float | None  # share of a step, by Amdahl's law

    def to_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        row = dataclasses.asdict(self.measured)
        row.pop("losses")
        row["seconds_per_batch"] = self.measured.seconds_per_batch
        return row | {
            "against": self.against,
            "same_batch": self.same_batch,
            "speed_up": self.speed_up,
            "efficiency": self.efficiency,
            "parallel_fraction": self.parallel,
        }


def speed_up(seconds: float, base_seconds: float) -> float:
    """How many times as fast, from the time of the same work."""
    return base_seconds / seconds


def efficiency(speed: float, devices: int, base_devices: int = 1) -> float:
    """Speed-up over what the devices alone would give."""
    return speed * base_devices / devices


def amdahl(speed: float, devices: float) -> float | None:
    """Share p of the work that runs in parallel if `devices` times the devices give that speed-up: S = 1/(1 - p + p/n).

    Amdahl, AFIPS 1967. None where the law does not speak: n = 1, or more devices that are slower.
    """
    return None if devices <= 1 or speed < 1 else (1 - 1 / speed) / (1 - 1 / devices)


def compare(runs: Sequence[Measured], baseline: str | None = None) -> list[Row]:
    """A row a run, in the order given.

    A run's baseline is the one with the fewest devices among those of its model and its global batch, else among those
    of its model; the first of equals. Speed-up is the ratio of images a second, so it also holds between different
    batches, but compare at equal global batch where you can. `baseline`: this run for all.
    """
    return [_row(run, _baseline(run, runs, baseline)) for run in runs]


def _baseline(run: Measured, runs: Sequence[Measured], named: str | None) -> Measured:
    if named is not None:
        return next(other for other in runs if other.run == named)
    alike = [other for other in runs if other.arch == run.arch]
    equal = [other for other in alike if other.batch == run.batch]
    fewest = min(equal, key=lambda other: other.devices)
    # alone with its batch, it is measured against another one; there is nothing to learn from itself
    return fewest if len(equal) > 1 else min(alike, key=lambda other: other.devices)


def _row(run: Measured, base: Measured) -> Row:
    if run is base:
        return Row(run, None, same_batch=True, speed_up=None, efficiency=None, parallel=None)
    speed = run.images_per_s / base.images_per_s
    more = run.devices / base.devices
    return Row(
        run,
        base.run,
        run.batch == base.batch,
        speed,
        efficiency(speed, run.devices, base.devices) if more != 1 else None,
        amdahl(speed, more),
    )


HEAD = (
    *("run", "method", "world", "batch", "s/batch", "images/s", "accuracy %", "best %", "train %", "time s"),
    *("speed-up", "efficiency", "parallel"),
)
# What a narrow terminal is spared, in this order
EXPENDABLE = ("train %", "best %", "parallel", "s/batch", "efficiency", "time s", "method", "batch", "world")


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table as text, head first. A speed-up between different batches is marked with ~."""
    return [HEAD, *(_cells(row) for row in rows)]


def _cells(row: Row) -> tuple[str, ...]:
    run = row.measured
    speed = "1" if row.against is None else f"{'' if row.same_batch else '~'}{row.speed_up:.3f}"
    return (
        run.label,
        run.method,
        str(run.devices),
        str(run.batch),
        f"{run.seconds_per_batch:.4g}",
        f"{run.images_per_s:.1f}",
        _or_dash(run.accuracy, "{:.2f}"),
        _or_dash(run.best, "{:.2f}"),
        _or_dash(run.train_accuracy, "{:.2f}"),
        _or_dash(run.seconds, "{:.1f}"),
        speed,
        _or_dash(row.efficiency, "{:.0%}"),
        _or_dash(row.parallel, "{:.1%}"),
    )


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def markdown(rows: Sequence[Row], width: int | None = None) -> str:
    """A table that is readable as it is and in any Markdown viewer; numbers to the right.

    width: of a terminal, in which it must fit; then columns are left out, the least telling first, and named below.
    """
    table = [[cell.replace("|", "\\|") for cell in line] for line in cells(rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEAD))]
    kept = list(range(len(HEAD)))
    for name in EXPENDABLE:
        if width is None or sum(widths[column] + 3 for column in kept) + 1 <= width:
            break
        kept.remove(HEAD.index(name))

    def line(row: Sequence[str]) -> str:
        padded = (row[c].ljust(widths[c]) if c < 2 else row[c].rjust(widths[c]) for c in kept)
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (widths[c] + 2) if c < 2 else "-" * (widths[c] + 1) + ":" for c in kept) + "|"
    text = "\n".join([line(table[0]), rule, *(line(row) for row in table[1:])])
    if len(kept) < len(HEAD):
        text += "\n\nnot shown here: " + ", ".join(name for c, name in enumerate(HEAD) if c not in kept)
    if any(not row.same_batch for row in rows):
        text += "\n\n~ against a run with another global batch: images a second are compared"
    return text
