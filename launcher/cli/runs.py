"""`launcher runs`: list the runs recorded here, or the runs on nodes."""

from __future__ import annotations

import json as json_
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.table import Column, Table
from rich.text import Text

from launcher.cli import options, terminal
from launcher.cli.status import STYLES
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NodesFailed
from launcher.model.plan import RunId, plain
from launcher.node.connect import connect
from launcher.records import store
from launcher.records.measured import top1
from launcher.records.store import Record
from launcher.run.locate import list_runs
from launcher.run.state import RunState, state_of

REFUSED = "refused"  # state of a run whose `up` failed before every container was started
RUNS_TIMEOUT = 5.0  # seconds to connect to a node, which is only asked whether a run is still active


@dataclass(frozen=True)
class RunRow:
    """A line of `launcher runs`. top1: percent. started_by: user@host of the caller, and the uid on the first node."""

    run: str
    state: str
    exit_code: int | None
    nodes: tuple[str, ...]
    top1: float | None = None
    started_by: str = ""


def runs(
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """List the runs recorded here; nodes are queried for unfinished runs. With
    --nodes, list the runs on those nodes.

    Example: launcher runs --nodes gpu-a,gpu-b
    """
    hosts = options.hosts(nodes, on)
    rows, failed = (_on_record(ssh_config), []) if hosts is None else _on_nodes(hosts, ssh_config)
    if json:
        typer.echo(json_.dumps(plain(rows), indent=2))
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
            Text(row.state, style=STYLES.get(row.state, "")),
            "" if row.exit_code is None else str(row.exit_code),
            Text(", ".join(row.nodes)),
            Text(row.started_by) if row.top1 is None else f"{row.top1:.2f}",
        )
    terminal.table_console().print(table if rows else "no runs yet: launcher up JOB")


def _on_record(ssh_config: Path | None) -> list[RunRow]:
    rows, records = [], store.records()
    for problem in store.misplaced():
        Reporter().warn(problem)
    seen = _seen_by_nodes([record for record in records if record.result() is None], ssh_config)
    for record in records:
        result = record.result() or {"state": seen[record.run]}
        names = tuple(node.name for node in record.nodes())
        state = REFUSED if record.refused and result["state"] == RunState.FAILED else result["state"]
        rows.append(RunRow(record.run, state, result.get("exit_code"), names, top1(result.get("last", {}))))
    return rows


def _seen_by_nodes(records: Sequence[Record], ssh_config: Path | None) -> dict[RunId, str]:
    """Return the states of these runs on their nodes; `unreachable` if the reachable nodes do not determine it."""
    hosts = sorted({node.host for record in records for node in record.nodes()})
    named = [(host, host) for host in hosts]
    with connect(named, None, ssh_config, allow_failures=True, timeout=RUNS_TIMEOUT, ask=False) as fleet:
        listing = list_runs(fleet, Reporter().log)
    seen = {}
    for record in records:
        states, nodes = [f.state for f in listing.runs.get(record.run, ())], record.nodes()
        silent = sum(node.host in listing.failed for node in nodes)
        seen[record.run] = state_of(states, len(nodes), min_nodes=record.min_nodes, silent=silent).value
    return seen


def _on_nodes(hosts: list[str], ssh_config: Path | None) -> tuple[list[RunRow], list[LauncherError]]:
    """Return the runs on these nodes, and the errors of nodes that did not list theirs."""
    rows = []
    with connect([(host, host) for host in hosts], ssh_config=ssh_config, allow_failures=True) as fleet:
        listing = list_runs(fleet, Reporter().log)
    for run, found in listing.runs.items():
        states, labels = [f.state for f in found], found[0].labels
        codes = [state.exit_code for state in states]
        code = next(filter(None, codes), None if None in codes else 0)
        names = tuple(f.labels.node for f in found)
        silent = labels.nodes - len(found) if listing.failed else 0  # may be on a node that does not respond
        state = state_of(states, labels.nodes, min_nodes=labels.min_nodes, silent=silent).value
        rows.append(RunRow(run, state, code, names, started_by=labels.started_by))
    return rows, [*listing.failed.values()]
