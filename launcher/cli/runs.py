"""`launcher runs`: list the runs recorded here, or the runs on nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from launcher.api.history import (
    DISCARDED,
    RunRow,
    SweepRow,
    folded,
    others_of,
    recorded_runs,
    runs_on,
    sweep_of,
    sweep_row,
    unstarted,
)
from launcher.cli import options, terminal
from launcher.cli.status import STYLES
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NodesFailed, RunUnknown
from launcher.model.plan import plain

NAMED = 3  # other sweeps of a job, in a message: the latest


def runs(
    sweep: Annotated[
        str | None, typer.Argument(metavar="SWEEP|JOB", help="List the runs of this sweep, or of this job.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="List every run of every sweep.")] = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """List the runs recorded here, and a line for each sweep; nodes are queried for
    unfinished runs. With --nodes, list the runs that have containers on those nodes,
    and name those of which only files are left; one that has other nodes, which were
    not asked, is `ended here`, without an exit code. The exit code is that of a command
    that waited for the run.

    A run is `refused` if its `up` ended with an error before all of it was started:
    of the latest, the reason is shown; --json has it as `why`. It is `discarded` if
    its sweep has moved its variant to another machine.

    Example: launcher runs --nodes gpu-a,gpu-b
    """
    hosts = options.hosts(nodes, on)
    log, failed = Reporter().log, list[LauncherError]()
    if hosts is None:
        rows = recorded_runs(log, ssh_config=ssh_config)
    else:
        rows, failed = runs_on(hosts, log, of=sweep, ssh_config=ssh_config)
    every = _of(sweep, rows) if sweep is not None else rows
    shown = folded(rows, recorded=hosts is None) if sweep is None and not all_ else every
    group = sweep_of(sweep, rows) if sweep is not None and hosts is None else None
    if group is not None and group != sweep and not json:
        others = others_of(str(sweep), group, rows)[-NAMED:]
        log(f"{sweep} is the sweep {group}" + (f"; others of this job: {', '.join(others)}" if others else ""))
    if group is not None:
        shown = [*every, *unstarted(group, every)]
    if json:
        terminal.say_json([_to_dict(row) for row in shown])
    elif shown or not failed:
        _print(shown, "top-1" if hosts is None else "by")
        if (last := shown[-1] if shown else None) and isinstance(last, RunRow) and last.why:
            terminal.note(f"{last.run} was not started: {last.why}")
        if group is not None and len(shown) > len(every):
            terminal.note(sweep_row(group, every).left)
        elif left := [row.left for row in shown if isinstance(row, SweepRow) and row.resume]:
            terminal.note(left[-1])  # of the latest: the others may have been left as they are for months
    if failed:
        raise NodesFailed(failed)


def _of(name: str, rows: Sequence[RunRow]) -> list[RunRow]:
    """Return the runs of a sweep, or those that begin with the name. Raises RunUnknown."""
    if (group := sweep_of(name, rows)) is not None:
        return [row for row in rows if row.group and row.group.group == group]
    found = [row for row in rows if row.run.startswith(name)]
    if not found:
        raise RunUnknown(name, "no such sweep, job or run", "to list all: launcher runs")
    return found


def _to_dict(row: RunRow | SweepRow) -> dict[str, object]:
    """A row of a sweep has `sweep` and `states`, that of a run `run` and `state`, and its sweep as `group`."""
    found: dict[str, object] = plain(row)
    if isinstance(row, RunRow):
        group = row.group
        found |= {"group": group and group.group, "variant": group and group.variant}
    return found


def _print(rows: Sequence[RunRow | SweepRow], last: str) -> None:
    run = Column("run", no_wrap=True)  # the others wrap first
    grouped = [row.group for row in rows if isinstance(row, RunRow) and row.group]
    variant = [Column("variant")] if grouped else []
    lines = [_sweep(row) if isinstance(row, SweepRow) else _run(row) for row in rows]
    ends = [last] if any(line[-1] for line in lines) else []
    table = Table(run, *variant, "state", "exit", "nodes", *ends, box=None, pad_edge=False, header_style="bold")
    for row, line in zip(rows, lines, strict=True):
        table.add_row(line[0], *([_variant(row)] if grouped else []), *line[1 : 4 + len(ends)])
    terminal.table_console().print(table if rows else "no runs yet: launcher up JOB")


def _variant(row: RunRow | SweepRow) -> Text:
    return Text(row.group.shown if isinstance(row, RunRow) and row.group else "")


def _run(row: RunRow) -> tuple[str, Text, str, Text, Text]:
    by = None if row.state == DISCARDED else row.stopped_by or row.ended_by  # neither has discarded it
    return (
        row.run,
        Text(row.state, style=STYLES.get(row.state, "")) + (f" by {by}" if by else ""),
        "" if row.exit_code is None else str(row.exit_code),
        Text(", ".join(row.nodes) + (f"; not asked: {', '.join(row.not_asked)}" if row.not_asked else "")),
        Text(row.started_by if row.top1 is None else f"{row.top1:.2f}"),
    )


def _sweep(row: SweepRow) -> tuple[str, Text, str, Text, Text]:
    states = [Text(f"{count} {state}", style=STYLES.get(state, "")) for state, count in row.states.items()]
    best = "" if row.top1 is None else f"{row.top1:.2f} {row.best}"
    return (
        row.sweep,
        Text(", ").join(states),
        "" if row.exit_code is None else str(row.exit_code),
        Text(", ".join(row.nodes)),
        Text(row.started_by or best),
    )
