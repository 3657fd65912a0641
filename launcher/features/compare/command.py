"""`launcher compare`: tables and plots of experiments from the records of runs."""

from __future__ import annotations

import json as json_
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import completion, options, terminal
from launcher.errors import RunUnknown, UsageError
from launcher.features.compare.comparison import Unmeasured, markdown, page
from launcher.features.compare.comparison import compare as compare_
from launcher.features.compare.plot import draw
from launcher.local_files import write_atomic
from launcher.records.groups import differences, labels, select
from launcher.records.measured import Measured, read
from launcher.records.store import Record, find, job_of


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...|GROUP",
            autocompletion=completion.runs,
            help="Runs or a sweep (default: the latest sweep or job).",
        ),
    ] = None,
    baseline: Annotated[str | None, typer.Option(metavar="RUN", help="Compare all runs with this run.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a plot to FILE (.png or .svg).")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page to FILE.")] = None,
    json: options.Json = False,
) -> None:
    """Print a Markdown table. Each run is compared with the run that has the fewest
    devices and the same model and global batch size.

    Example: launcher compare --html comparison.html
    """
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise UsageError(str(plot), "unsupported image format", "use a file name that ends with .png or .svg")
    chosen = select(runs or [])
    measured, others, errors = _read(chosen, labels(chosen), named=bool(runs))
    if not measured and not json:
        done = [error for error, run in zip(errors, others, strict=True) if run.state == "done"]
        raise (done or errors)[-1]  # a table of dashes would say nothing
    base = None
    if baseline is not None:
        base = find(baseline).run
        if base not in {run.run for run in measured}:
            raise UsageError(base, "is not one of the compared runs", "add it to the arguments")
    rows = compare_(measured, base)
    settings = {record.run: own for (record, _), own in zip(chosen, differences(chosen), strict=True)}
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    found = [row.to_dict() for row in rows] + [asdict(other) for other in others]
    found = [row | {"settings": settings[row["run"]]} for row in found]
    ordered = [settings[row["run"]] for row in found]
    table = json_.dumps(found, indent=2) if json else markdown(rows, width, others, ordered)
    terminal.say(table)  # contains text from a program's metrics
    if plot is not None:
        write_atomic(plot, draw(rows, plot.suffix.lower()[1:]))
        terminal.note(f"wrote {plot}")
    if html is not None:
        write_atomic(html, page(rows, "Comparison: " + ", ".join(runs or [job_of(chosen[-1][0].run)]), others).encode())
        terminal.note(f"wrote {html}")


def _read(
    chosen: Sequence[tuple[Record, str | None]], names: Sequence[str], *, named: bool
) -> tuple[list[Measured], list[Unmeasured], list[RunUnknown]]:
    """Return the measurements of each run, the runs without any, and their errors.

    named: the user named these runs. Raises RunUnknown for one without measurements that is not part of a sweep.
    """
    measured, others, errors = list[Measured](), list[Unmeasured](), list[RunUnknown]()
    for (record, variant), name in zip(chosen, names, strict=True):
        try:
            measured.append(read(record.paths, name))
        except RunUnknown as error:
            if named and variant is None:
                raise
            errors.append(error)
            others.append(Unmeasured(record.run, name, str((record.result() or {}).get("state", "no result yet"))))
    return measured, others, errors
