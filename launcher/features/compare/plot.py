"""A comparison as an image: loss over time, accuracy over batch, speed-ups. Panels without data are omitted."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from launcher.errors import UsageError
from launcher.features.compare.comparison import Row
from launcher.features.compare.tags import TagRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Panel = tuple[str, Callable[["Axes", Sequence[Row]], None]]  # title, function that draws it


def draw(rows: Sequence[Row], form: str) -> bytes:
    """Return the image as `form`, png or svg. Raises UsageError if matplotlib is missing."""
    return _draw(_panels(rows), rows, form)


def draw_tags(rows: Sequence[TagRow], tags: Sequence[str], form: str) -> bytes:
    """Return an image of the curves of these tags, like `draw`."""
    return _draw([(tag, partial(_curves, tag)) for tag in tags], rows, form)


def _draw(panels: Sequence[tuple[str, Callable[[Axes, Any], None]]], rows: object, form: str) -> bytes:
    try:
        from matplotlib.figure import Figure  # imported here: it takes half a second, which most commands do not need
    except ImportError as error:
        raise UsageError("compare", f"a plot requires matplotlib ({error})", "run: pip install matplotlib") from error
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.4 * lines), layout="constrained")
    for index, (title, fill) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, index + 1)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        fill(axes, rows)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()


def _panels(rows: Sequence[Row]) -> list[Panel]:
    known = [row.measured.batch for row in rows if row.measured.accuracy is not None]
    speed = partial(_bars, lambda row: row.measured.images_per_s, "images per second", "{:.0f}")
    panels: list[Panel] = [("Training loss over time", _loss), ("Speed", speed)]
    if len(set(known)) > 1:
        panels.append(("Accuracy over global batch", _batch))
    elif known:
        accuracy = partial(_bars, lambda row: row.measured.accuracy, "top-1, percent", "{:.2f}")
        panels.append(("Validation accuracy", accuracy))
    if any(row.speed_up is not None for row in rows):
        panels.append(("Speed-up", partial(_bars, lambda row: row.speed_up or 1.0, "speed-up over baseline", "{:.2f}")))
    return panels


def _loss(axes: Axes, rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        times, losses = zip(*row.measured.losses, strict=True)
        marker = "." if len(times) < 30 else ""
        axes.plot(times, losses, color=_colour(index), label=_name(row), linewidth=1.3, marker=marker)
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)  # below the axes


def _curves(tag: str, axes: Axes, rows: Sequence[TagRow]) -> None:
    for index, row in enumerate(rows):
        if tag in row.curves:
            steps, values = zip(*((point.step, point.value) for point in row.curves[tag].points), strict=True)
            axes.plot(steps, values, color=_colour(index), label=row.label, marker="." if len(steps) < 30 else "")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)  # below the axes


def _batch(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a line per method."""
    for method in dict.fromkeys(row.measured.method for row in rows):
        runs = sorted((row.measured for row in rows if row.measured.method == method), key=lambda run: run.batch)
        for kind, style, name in (("accuracy", "o-", "validation"), ("train_accuracy", "s--", "training")):
            points = [(run.batch, getattr(run, kind)) for run in runs if getattr(run, kind) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=f"{method}, {name}", markersize=5)
    batches = sorted({row.measured.batch for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches], rotation=0 if len(batches) < 8 else 45)
    axes.set_xlabel("images per step")
    axes.set_ylabel("top-1, percent")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _bars(value: Callable[[Row], float | None], unit: str, form: str, axes: Axes, rows: Sequence[Row]) -> None:
    """Draw horizontal bars, so that long names are readable; the first one on top."""
    known = {index: length for index, row in enumerate(rows) if (length := value(row)) is not None}
    positions, lengths = range(len(known)), list(known.values())
    bars = axes.barh(positions, lengths, color=[_colour(index) for index in known], height=0.7)
    axes.set_yticks(positions, [textwrap.fill(_name(rows[index]), 26) for index in known], fontsize=8)
    axes.invert_yaxis()
    axes.bar_label(bars, [form.format(length) for length in lengths], padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.set_xlabel(unit)


def _colour(index: int) -> str:
    return f"C{index}"  # of matplotlib's cycle of ten colours


def _name(row: Row) -> str:
    return f"{row.measured.label} ({row.measured.method} x {row.measured.devices})"
