"""A comparison as a picture: loss against time, accuracy against batch, speed-ups. A panel without data is left out."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.records.compare import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Panel = tuple[str, Callable[["Axes", Sequence[Row]], None]]  # its title, what fills it


def draw(rows: Sequence[Row], form: str) -> bytes:
    """The picture as `form`, png or svg. Raises UsageError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure  # only here: half a second that most commands do not need
    except ImportError as error:
        raise UsageError(
            "compare", f"a plot needs matplotlib ({error})", "install it: pip install 'launcher[plot]'"
        ) from error
    panels = _panels(rows)
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.4 * lines), layout="constrained")
    for place, (title, fill) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, place + 1)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        fill(axes, rows)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()


def _panels(rows: Sequence[Row]) -> list[Panel]:
    known = [row.measured.batch for row in rows if row.measured.accuracy is not None]
    speed = partial(_bars, lambda row: row.measured.images_per_s, "images a second", "{:.0f}")
    panels: list[Panel] = [("Training loss against time", _loss), ("Speed", speed)]
    if len(set(known)) > 1:
        panels.append(("Accuracy against global batch", _batch))
    elif known:
        accuracy = partial(_bars, lambda row: row.measured.accuracy, "top-1, percent", "{:.2f}")
        panels.append(("Validation accuracy", accuracy))
    if any(row.speed_up is not None for row in rows):
        panels.append(("Speed-up", partial(_bars, lambda row: row.speed_up or 1.0, "times its baseline", "{:.2f}")))
    return panels


def _loss(axes: Axes, rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        times, losses = zip(*row.measured.losses, strict=True)
        marker = "." if len(times) < 30 else ""
        axes.plot(times, losses, color=_colour(place), label=_name(row), linewidth=1.3, marker=marker)
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)  # below: it covers nothing


def _batch(axes: Axes, rows: Sequence[Row]) -> None:
    """A line a method; colours by run would say nothing here."""
    for method in dict.fromkeys(row.measured.method for row in rows):
        runs = sorted((row.measured for row in rows if row.measured.method == method), key=lambda run: run.batch)
        for kind, style, name in (("accuracy", "o-", "validation"), ("train_accuracy", "s--", "training")):
            points = [(run.batch, getattr(run, kind)) for run in runs if getattr(run, kind) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=f"{method}, {name}", markersize=5)
    batches = sorted({row.measured.batch for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches], rotation=0 if len(batches) < 8 else 45)
    axes.set_xlabel("images a step")
    axes.set_ylabel("top-1, percent")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _bars(value: Callable[[Row], float | None], unit: str, form: str, axes: Axes, rows: Sequence[Row]) -> None:
    """Horizontal, so that long names can be read; the first on top."""
    known = {place: length for place, row in enumerate(rows) if (length := value(row)) is not None}
    places, lengths = range(len(known)), list(known.values())
    bars = axes.barh(places, lengths, color=[_colour(place) for place in known], height=0.7)
    axes.set_yticks(places, [textwrap.fill(_name(rows[place]), 26) for place in known], fontsize=8)
    axes.invert_yaxis()
    axes.bar_label(bars, [form.format(length) for length in lengths], padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.set_xlabel(unit)


def _colour(place: int) -> str:
    return f"C{place}"  # of matplotlib's cycle of ten


def _name(row: Row) -> str:
    return f"{row.measured.label} ({row.measured.method} x {row.measured.devices})"
