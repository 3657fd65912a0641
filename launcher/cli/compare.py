"""`launcher compare`: the experiments' tables and pictures from the runs' records."""

from __future__ import annotations

import json as json_
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import options, terminal
from launcher.errors import UsageError
from launcher.local_files import write_atomic
from launcher.records.compare import compare as compare_
from launcher.records.compare import markdown, page
from launcher.records.groups import labels, select
from launcher.records.measured import read
from launcher.records.plot import draw
from launcher.records.store import find


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...|GROUP", help="Runs, or the name of a job whose latest run was a sweep."),
    ],
    baseline: Annotated[str | None, typer.Option(metavar="RUN", help="Measure all against this run.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="A picture: .png or .svg.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="One self-contained page.")] = None,
    json: options.Json = False,
) -> None:
    """A Markdown table. Each run is measured against the one with the fewest devices at its model and global batch."""
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise UsageError(str(plot), "unsupported image format", "call it something.png or something.svg")
    chosen = select(runs)
    measured = [read(record.paths, label) for (record, _), label in zip(chosen, labels(chosen), strict=True)]
    base = None
    if baseline is not None:
        base = find(baseline).run
        if base not in {run.run for run in measured}:
            raise UsageError(base, "is not among the runs that are compared", "name it among them too")
    rows = compare_(measured, base)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    table = json_.dumps([row.to_dict() for row in rows], indent=2) if json else markdown(rows, width)
    typer.echo(terminal.escaped(table))  # it has words of a program's metrics
    if plot is not None:
        write_atomic(plot, draw(rows, plot.suffix.lower()[1:]))
        typer.echo(f"wrote {plot}", err=True)
    if html is not None:
        write_atomic(html, page(rows, "Comparison: " + ", ".join(runs)).encode())
        typer.echo(f"wrote {html}", err=True)
