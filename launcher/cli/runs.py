"""`launcher runs`: list the runs recorded here, or the runs on nodes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table
from rich.text import Text

from launcher.api.history import RunRow, recorded_runs, runs_on
from launcher.cli import options, terminal
from launcher.cli.status import STYLES
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NodesFailed
from launcher.model.plan import plain


def runs(
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """List the runs recorded here; nodes are queried for unfinished runs. With
    --nodes, list the runs on those nodes. The exit code is that of a command that
    waited for the run.

    Example: launcher runs --nodes gpu-a,gpu-b
    """
    hosts = options.hosts(nodes, on)
    log, failed = Reporter().log, list[LauncherError]()
    if hosts is None:
        rows = recorded_runs(log, ssh_config=ssh_config)
    else:
        rows, failed = runs_on(hosts, log, ssh_config=ssh_config)
    if json:
        terminal.say_json(plain(rows))
    else:
        if rows or not failed:
            _print(rows, "top-1" if hosts is None else "by")
    if failed:
        raise NodesFailed(failed)


def _print(rows: Sequence[RunRow], last: str) -> None:
    run = Column("run", no_wrap=True)  # the others wrap first
    table = Table(run, "state", "exit", "nodes", last, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(
            row.run,
            Text(row.state, style=STYLES.get(row.state, "")) + (f" by {row.stopped_by}" if row.stopped_by else ""),
            "" if row.exit_code is None else str(row.exit_code),
            Text(", ".join(row.nodes)),
            Text(row.started_by) if row.top1 is None else f"{row.top1:.2f}",
        )
    terminal.table_console().print(table if rows else "no runs yet: launcher up JOB")
