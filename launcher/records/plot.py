"""A comparison as a picture: loss against time, accuracy against batch, speed-ups. Only what the runs can tell."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.records.compare import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Panel = tuple[str, Callable[["Axes", Sequence[Row], Sequence[str]], None]]


def draw(rows: Sequence[Row], form: str) -> bytes:
    """The picture as `form`, png or svg. Raises UsageError where matplotlib is missing."""
    try:
        from matplotlib import colormaps  # only here: half a second, and an extra that most runs do not need
        from matplotlib.colors import to_hex
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "compare", f"a plot needs matplotlib ({error})", "install it: pip install 'launcher[plot]'"
        ) from error
    panels = _panels(rows)
    columns = min(len(panels), 2)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.4 * lines), layout="constrained")
    palette = colormaps["tab10" if len(rows) <= 10 else "tab20"]
    colours = [to_hex(palette(i % palette.N)) for i in range(len(rows))]
    for place, (title, fill) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, place + 1)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
        fill(axes, rows, colours)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return buffer.getvalue()


def _panels(rows: Sequence[Row]) -> list[Panel]:
    panels: list[Panel] = [("Training loss against time", _loss), ("Speed", _speed)]
    known = [row.measured for row in rows if row.measured.accuracy is not None]
    if len({run.batch for run in known}) > 1:
        panels.append(("Accuracy against global batch", _batch))
    elif known:
        panels.append(("Validation accuracy", _accuracy))
    if any(row.speed_up is not None for row in rows):
        panels.append(("Speed-up", _speed_up))
    return panels


def _loss(axes: Axes, rows: Sequence[Row], colours: Sequence[str]) -> None:
    for row, colour in zip(rows, colours, strict=True):
        times, losses = zip(*row.measured.losses, strict=True)
        label = _name(row).replace("\n", " ")
        axes.plot(times, losses, color=colour, label=label, linewidth=1.3, marker="." if len(times) < 30 else "")
    axes.set_xlabel("seconds")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), frameon=False)  # below: it covers nothing


def _batch(axes: Axes, rows: Sequence[Row], colours: Sequence[str]) -> None:
    """A line a method: colours by run would tell nothing here."""
    del colours
    for method in dict.fromkeys(row.measured.method for row in rows):
        runs = sorted((row.measured for row in rows if row.measured.method == method), key=lambda run: run.batch)
        for kind, style in (("accuracy", "o-"), ("train_accuracy", "s--")):
            points = [(run.batch, getattr(run, kind)) for run in runs if getattr(run, kind) is not None]
            if points:
                label = f"{method}, {'validation' if kind == 'accuracy' else 'training'}"
                axes.plot(*zip(*points, strict=True), style, label=label, markersize=5)
    batches = sorted({row.measured.batch for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches], rotation=0 if len(batches) < 8 else 45)
    axes.set_xlabel("images a step")
    axes.set_ylabel("top-1, percent")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _accuracy(axes: Axes, rows: Sequence[Row], colours: Sequence[str]) -> None:
    known = [(row, row.measured.accuracy) for row in rows if row.measured.accuracy is not None]
    pale = [colours[rows.index(row)] for row, _ in known]
    _bars(axes, [_name(row) for row, _ in known], [value for _, value in known], pale, "{:.2f}")
    axes.set_xlabel("top-1, percent")


def _speed(axes: Axes, rows: Sequence[Row], colours: Sequence[str]) -> None:
    _bars(axes, [_name(row) for row in rows], [row.measured.images_per_s for row in rows], colours, "{:.0f}")
    axes.set_xlabel("images a second")


def _speed_up(axes: Axes, rows: Sequence[Row], colours: Sequence[str]) -> None:
    names = [_name(row) for row in rows]
    _bars(axes, names, [row.speed_up or 1.0 for row in rows], colours, "{:.2f}")
    axes.axvline(1, color="0.4", linewidth=0.8)
    axes.set_xlabel("times its baseline")


def _bars(axes: Axes, names: Sequence[str], values: Sequence[float], colours: Sequence[str], form: str) -> None:
    """Lying, so that long names are read without turning one's head; the first on top."""
    places = list(range(len(values)))
    bars = axes.barh(places, values, color=colours, height=0.7)
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=8)
    axes.margins(x=0.15)


def _name(row: Row) -> str:
    """Different for every row of one table, and in lines that leave room for the bars."""
    run = row.measured
    return textwrap.fill(f"{run.label} ({run.method} x {run.devices})", 26)
