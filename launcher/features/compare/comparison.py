"""Comparison of runs: speed-up, efficiency and parallel fraction; as a table and as an HTML page."""

from __future__ import annotations

import dataclasses
import html
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from math import isfinite
from typing import Any

from launcher.cli.status import LONGEST
from launcher.features.compare.measured import Measured
from launcher.job.overrides import shown_value
from launcher.job.scalars import ArgValue
from launcher.model.plan import shortened


@dataclass(frozen=True)
class Row:
    """One run against its baseline. None: not applicable, for the baseline itself or for equal numbers of devices."""

    measured: Measured
    against: str | None  # the baseline's run
    same_batch: bool = True  # whether the baseline has the same global batch
    speed_up: float | None = None
    efficiency: float | None = None  # 1: speed-up proportional to the number of devices
    parallel_fraction: float | None = None  # of a step, by Amdahl's law

    def to_dict(self) -> dict[str, Any]:
        """Return a flat dictionary for JSON."""
        measured, row = dataclasses.asdict(self.measured), dataclasses.asdict(self)
        del measured["losses"], row["measured"]
        return {**measured, "seconds_per_batch": self.measured.seconds_per_batch, **row}


@dataclass(frozen=True)
class Unmeasured:
    """A run that has ended or not started, without a step in its metrics."""

    run: str
    label: str
    state: str

    def cells(self, columns: int) -> tuple[str, ...]:
        return (f"{self.label} ({self.state})", *("-" for _ in range(columns - 1)))


def amdahl(speed: float, devices: float) -> float | None:
    """Return the parallel fraction p if n times the devices give speed-up S: S = 1/(1 - p + p/n). Amdahl, AFIPS 1967.

    None if the law does not apply: n = 1, or more devices that are slower.
    """
    return None if devices <= 1 or speed < 1 else (1 - 1 / speed) / (1 - 1 / devices)


def compare(runs: Sequence[Measured], baseline: str | None = None) -> list[Row]:
    """Return a row per run, in the order given.

    A run's baseline is the run with the fewest devices among those with the same model and global batch, else among
    those with the same model; the first one if several qualify. Speed-up is the ratio of images per second, so it also
    applies to different batches, but compare at equal global batch if possible. baseline: use this run for all.
    """
    return [_row(run, _baseline(run, runs, baseline)) for run in runs]


def _baseline(run: Measured, runs: Sequence[Measured], named: str | None) -> Measured:
    if named is not None:
        return next(other for other in runs if other.run == named)
    alike = [other for other in runs if other.arch == run.arch]
    equal = [other for other in alike if other.batch == run.batch]
    # the only run with its batch is compared with another batch, not with itself
    return min(equal if len(equal) > 1 else alike, key=lambda other: other.devices)


def _row(run: Measured, base: Measured) -> Row:
    if run is base:
        return Row(run, None)
    speed, more = run.images_per_s / base.images_per_s, run.devices / base.devices
    efficiency = speed / more if more != 1 else None
    return Row(run, base.run, run.batch == base.batch, speed, efficiency, amdahl(speed, more))


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _speed_up(row: Row) -> str:
    return "1" if row.against is None else f"{'' if row.same_batch else '~'}{row.speed_up:.3f}"


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "run": lambda row: row.measured.label,
    "method": lambda row: row.measured.method,
    "gradients": lambda row: row.measured.gradients or "plain",
    "world": lambda row: str(row.measured.devices),
    "batch": lambda row: str(row.measured.batch),
    "s/batch": lambda row: f"{row.measured.seconds_per_batch:.4g}",
    "images/s": lambda row: f"{row.measured.images_per_s:.1f}",
    "accuracy %": lambda row: _or_dash(row.measured.accuracy, "{:.2f}"),
    "best %": lambda row: _or_dash(row.measured.best, "{:.2f}"),
    "train %": lambda row: _or_dash(row.measured.train_accuracy, "{:.2f}"),
    "time s": lambda row: _or_dash(row.measured.seconds, "{:.1f}"),
    "memory MB": lambda row: _or_dash(row.measured.memory_mb, "{:.1f}"),
    "MFU": lambda row: _or_dash(row.measured.mfu, "{:.1%}"),
    "speed-up": _speed_up,
    "efficiency": lambda row: _or_dash(row.efficiency, "{:.0%}"),
    "parallel": lambda row: _or_dash(row.parallel_fraction, "{:.1%}"),
}
_FEWEST = 12  # characters of a label
# Omitted on a narrow terminal, in this order
EXPENDABLE = (
    *("train %", "best %", "parallel", "MFU", "memory MB", "s/batch", "efficiency", "time s"),
    *("method", "batch", "world"),
)


def cells(rows: Sequence[Row], others: Sequence[Unmeasured] = ()) -> list[tuple[str, ...]]:
    """Return the table's cells, header first. A speed-up between different batches is marked with ~.

    There is a column for how gradients are compressed if any run compresses them.
    """
    compressed = any(row.measured.gradients for row in rows)
    names = tuple(name for name in COLUMNS if name != "gradients" or compressed)
    measured = [tuple(COLUMNS[name](row) for name in names) for row in rows]
    return [names, *measured, *(other.cells(len(names)) for other in others)]


def fitted(labels: Sequence[str], room: int | None) -> tuple[list[str], str]:
    """Return the labels in so many characters, and the text below a table in which they do not tell the lines apart.

    room: None: as many as there are.
    """
    if room is None:
        return [*labels], ""
    found = [shortened(label, max(_FEWEST, min(room, LONGEST["variant"]))) for label in labels]
    every = "\n".join(f"  {label}" for label in labels)
    return found, "" if len({*found}) == len({*labels}) else f"\n\nin the order of the lines:\n{every}"


def markdown(
    rows: Sequence[Row],
    width: int | None = None,
    others: Sequence[Unmeasured] = (),
    settings: Sequence[Mapping[str, ArgValue]] = (),
) -> str:
    """Return a Markdown table that is readable as plain text; numbers are right-aligned.

    width: of the terminal. Labels are shortened, and the least important columns omitted if the table does not fit;
    these are named below it.
    settings: of each line, those in which the runs differ; they are listed unless the labels have all of them.
    """
    table = [[cell.replace("|", "\\|") for cell in line] for line in cells(rows, others)]
    labels, apart = fitted([line[0] for line in table[1:]], width and LONGEST["variant"])
    table[1:] = [[label, *line[1:]] for label, line in zip(labels, table[1:], strict=True)]
    names, widths = table[0], [max(map(len, column)) for column in zip(*table, strict=True)]
    kept = list(range(len(names)))
    for name in EXPENDABLE:
        if width is None or sum(widths[column] + 3 for column in kept) + 1 <= width:
            break
        kept.remove(names.index(name))

    def line(row: Sequence[str]) -> str:
        padded = (row[c].ljust(widths[c]) if c < 2 else row[c].rjust(widths[c]) for c in kept)
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (widths[c] + 2) if c < 2 else "-" * (widths[c] + 1) + ":" for c in kept) + "|"
    text = "\n".join([line(table[0]), rule, *(line(row) for row in table[1:])]) + apart
    if len(kept) < len(names):
        hidden = ", ".join(name for c, name in enumerate(names) if c not in kept)
        text += "\n\n" + textwrap.fill(f"omitted columns: {hidden}", width or 80)
    if any(not row.same_batch for row in rows):
        text += "\n\n~ baseline with a different global batch: images per second are compared"
    shown = [line[0] for line in cells(rows, others)[1:]]
    if any(f"{key}=" not in label for label, own in zip(shown, settings, strict=False) for key in own):
        values = (f"  {key}: {', '.join(shown_value(own[key]) for own in settings)}" for key in settings[0])
        lines = (textwrap.fill(line, width or 1000, subsequent_indent="    ") for line in values)
        text += "\n\nsettings that differ, in the order of the lines:\n" + "\n".join(lines)
    return text


def page(rows: Sequence[Row], title: str, others: Sequence[Unmeasured] = ()) -> str:
    """Return a self-contained HTML page: page.html with the table, which needs no script, and the figures to draw."""
    head, *body = cells(rows, others)
    runs = "".join(
        f"<li>{html.escape(row.measured.label)}: <code>{html.escape(row.measured.run)}</code>"
        f"{', against <code>' + html.escape(row.against) + '</code>' if row.against else ''}</li>"
        for row in rows
    )
    figures = [row.to_dict() | {"losses": [p for p in row.measured.losses if isfinite(p[1])]} for row in rows]
    return fill_page(title, head, body, runs, figures)


def fill_page(
    title: str, head: Sequence[str], body: Sequence[Sequence[str]], runs: str, figures: Sequence[Mapping[str, Any]]
) -> str:
    """Return the page. runs: HTML. figures: of each run what page.html draws."""
    parts = {
        "title": html.escape(title),
        "table": f"<thead>{_tr('th', head)}</thead><tbody>{''.join(_tr('td', line) for line in body)}</tbody>",
        "runs": runs,
        "data": json.dumps(figures).replace("<", "\\u003c"),  # so that no name can end the script
    }
    text = resources.files("launcher.features.compare").joinpath("page.html").read_text(encoding="utf-8")
    for name, part in parts.items():  # parts cannot contain placeholders: their < are escaped
        text = text.replace(f"<!--{name}-->", part)
    return text


def _tr(tag: str, row: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
