"""The options of `launcher doctor`, and the output: a table, then a line for each abnormal part."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from launcher.cli import terminal
from launcher.cli.doctor import Examination, Examined
from launcher.cli.terminal import Reporter
from launcher.errors import UsageError
from launcher.features.bench import run
from launcher.features.bench.forecast import gradient_bytes, lines
from launcher.features.bench.health.measures import ALL_REDUCE
from launcher.features.bench.health.verdict import figure
from launcher.features.bench.run import BenchResult, Given
from launcher.features.bench.table import DIFFERS, ODD, WIDTH, table
from launcher.job.models import Job
from launcher.model.plan import plain
from launcher.node.connect import Fleet

MINUTES = 2.0


def options(
    job: Job | None,
    on: str | None,
    *,
    bench: Annotated[
        bool,
        typer.Option("--bench", help="Measure the parts of each node in the job's image and report slow ones."),
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=0.1,
            max=60.0,
            help=f"With --bench: time limit of the measurements, in minutes; default: {MINUTES:g}.",
        ),
    ] = None,
    gradients: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="With --bench: bytes of the gradients of a step, such as 102M; default: of the trainer's model.",
        ),
    ] = None,
    step: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.0001,
            max=86400,
            help="With --bench: time of a step on one node; default: the trainer's model.",
        ),
    ] = None,
) -> Examination | None:
    """With --bench, the exit code is also 3 if a part is slow. Of two parts that
    differ, --bench blames neither: that is a warning.
    """
    if not bench:
        for name, value in (("minutes", minutes), ("gradients", gradients), ("step", step)):
            if value is not None:
                raise UsageError(f"--{name}", "needs --bench")
        return None
    # Its containers load the machines, and are removed as after a Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if job is None:
        raise UsageError("--bench", "needs a job file: the job's nodes are measured in the job's image")
    if on is not None:
        raise UsageError(f"--on {on}", "does not support --bench", f"launcher doctor JOB --on {on}")
    given = Given(_bytes(gradients), step)
    return partial(_examine, job, 60 * (minutes or MINUTES), given)


def _bytes(text: str | None) -> float | None:
    try:
        return gradient_bytes(text) if text is not None else None
    except ValueError as error:
        raise UsageError("--gradients", str(error)) from error


def _examine(job: Job, seconds: float, given: Given, fleet: Fleet, unfit: Mapping[str, str]) -> Examined:
    found = run.bench(job, fleet, seconds, unfit, Reporter().log, given)
    return Examined("bench", plain(found), found.faulty or not found.nodes, partial(_show, found))


def _show(examined: BenchResult, console: Console) -> None:
    for node, why in examined.skipped.items():
        console.print(f"[yellow]skipped[/] {escape(f'{node}: {why}')}")
    if not examined.nodes:
        console.print("nothing was measured; repeat the command once a node is free and passes its checks")
        return
    console.print()
    wide = terminal.console(soft_wrap=False)
    wide.width = max(wide.width, WIDTH)  # a narrow terminal breaks lines, where rich would leave out marks
    wide.print(table(examined.nodes, examined.measures, examined.findings))
    for measure in examined.measures:
        if measure.kind == ALL_REDUCE:
            console.print(f"all-reduce over all nodes: {figure(measure.value)} {measure.unit} bus bandwidth")
    for note in examined.notes:
        console.print(escape(f"note: {note}"))
    console.print()
    for finding in examined.findings:
        sign = f"{DIFFERS} [yellow]warning:[/]" if finding.undecided else ODD
        console.print(f"{sign} {escape(finding.line)}")
    if not examined.findings:
        console.print("no part is slower than comparable parts")
    for line in forecast_lines(examined):
        console.print(escape(line))


def forecast_lines(examined: BenchResult) -> Iterator[str]:
    """Yield what several nodes bring, if several were measured."""
    if len(examined.nodes) < 2:
        if examined.work is not None:
            yield "no forecast: it needs the link between two nodes"
    elif examined.work is None:
        yield "no forecast: --gradients SIZE says how many bytes a step sums, 4 for each trained parameter"
    elif not examined.forecast:
        yield "no forecast: no link was measured"
    else:
        yield from lines(examined.forecast, examined.work)
