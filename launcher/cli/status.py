"""`launcher status` and `launcher runs`: the nodes as they are now, and the runs on record."""

from __future__ import annotations

import json as json_
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher.cli import options, terminal
from launcher.cli.terminal import Reporter
from launcher.model.plan import RunId, plain
from launcher.node.connect import connect
from launcher.records import store
from launcher.records.measured import duration, top1
from launcher.records.store import Record
from launcher.run.locate import attach, on_nodes
from launcher.run.state import of_containers
from launcher.run.status import NodeStatus, RunStatus, Utilization, run_status

REFRESH = 2.0
RUNS_TIMEOUT = 5.0  # seconds to connect to a node of which `runs` wants to know only whether a run goes on
NARROW = 12  # columns of the last line below which it is left out, and then others from the right
LONGEST_NAME = 24  # columns of a node's name: `user@host.example.org:22` may be one


def status(
    run: options.Run = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it up to date until Ctrl-C.")] = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """The nodes as they are now; a node that does not answer is shown as unreachable (exit code 3)."""
    console = terminal.console(soft_wrap=False)
    with attach(run, options.hosts(nodes, on), ssh_config, Reporter().log) as attached:
        masker = attached.record.mask

        def ask() -> RunStatus:
            seen = run_status(attached)
            return replace(seen, nodes=tuple(replace(node, last=masker(node.last)) for node in seen.nodes))

        seen = _watch(ask, console) if watch and not json else ask()
        if json:
            typer.echo(seen.to_json())
        elif not watch:
            console.print(render(seen, console.width))
    reasons = [node.reason for node in seen.nodes if node.reason is not None]
    for reason in reasons:
        typer.echo(terminal.escaped(reason), err=True)
    if reasons:
        raise typer.Exit(3)


def _watch(ask: Callable[[], RunStatus], console: Console) -> RunStatus:
    """Until the run has ended, or Ctrl-C; what was seen last."""
    seen = ask()
    with Live(render(seen, console.width), console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while not seen.ended:
            time.sleep(REFRESH)
            seen = ask()
            live.update(render(seen, console.width), refresh=True)
    return seen


def render(seen: RunStatus, width: int) -> RenderableType:
    """The run and how far it is, then a line a node; empty columns are left out.

    Where the terminal is too narrow for all, the last line of the log is cut first, then columns from the right.
    """
    rows = [_cells(node) for node in seen.nodes]
    needed = {
        name: max(cell_len(name), *(cell_len(row[name]) for row in rows))
        for name in (rows[0] if rows else ())
        if name in ALWAYS or any(row[name] for row in rows)
    }
    room = width
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, wanted in needed.items():
        columns = min(wanted, LONGEST_NAME if name == "node" else width)
        if name not in ALWAYS and room < (min(columns, NARROW) if name == "last line" else columns):
            continue
        table.add_column(name, no_wrap=True, overflow="ellipsis", width=max(1, min(columns, room)))
        room -= columns + 2
    for row in rows:
        cells = {name: Text(text) for name, text in row.items()}
        cells["state"].stylize(_STYLES.get(row["state"], ""))
        table.add_row(*(cells[str(column.header)] for column in table.columns))
    head = Text(f"{seen.run}  ", style="bold") + Text(seen.state, style=_STYLES.get(seen.state, ""))
    if seen.started_by:
        head += Text(f"  by {seen.started_by}", style="dim")
    why = [
        Text(f"{node.node}: restart {place} after {reason}", style="yellow")
        for node in seen.nodes
        for place, reason in enumerate(node.restarted, 1)
    ]
    progress = [] if seen.progress is None else [Text("  ".join(seen.progress.parts()), style="cyan")]
    if seen.world is not None:
        progress.insert(0, Text(seen.world.text))
    return Group(head, *progress, table, *why)


ALWAYS = ("state", "node", "ranks", "restarts")
_STYLES = {"running": "green", "done": "green", "failed": "red", "unreachable": "red", "stopped": "yellow"}


def _cells(node: NodeStatus) -> dict[str, str]:
    """By column, in their order: the least important one last."""
    first, last = node.ranks or ("", "")
    return {
        "state": node.state,
        "node": node.node,
        "ranks": str(first) if first == last else f"{first}-{last}",
        "restarts": str(node.restarts),
        "exit": ("" if node.exit_code is None else str(node.exit_code)) + (" OOM" if node.oom_killed else ""),
        "age": "" if node.age is None else duration(node.age),
        "GPUs": _gpus(node),
        "memory": _memory(node.use),
        "last line": "".join(char if char.isprintable() else " " for char in node.last),
    }


def _gpus(node: NodeStatus) -> str:
    """`8: 91-98 %, 14.2/16 GiB`."""
    count = len(node.gpus)
    seen = () if node.use is None else node.use.gpus
    busy = sorted(gpu.busy for gpu in seen if gpu.busy is not None)
    used, total = max(((gpu.memory, gpu.memory_total or 0) for gpu in seen if gpu.memory is not None), default=(0, 0))
    if not busy or not total:
        return str(count) if count else ""
    share = str(busy[0]) if busy[0] == busy[-1] else f"{busy[0]}-{busy[-1]}"
    return f"{count}: {share} %, {used / 1024:.1f}/{total / 1024:.0f} GiB"


def _memory(seen: Utilization | None) -> str:
    return f"{seen.memory / 2**30:.1f}/{seen.memory_total / 2**30:.0f} GiB" if seen and seen.memory_total else ""


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
    """What is on record here, and what nodes say of runs without an end; with --nodes, the runs on those nodes."""
    hosts = options.hosts(nodes, on)
    rows = _on_record(ssh_config) if hosts is None else _on_nodes(hosts, ssh_config)
    if json:
        typer.echo(json_.dumps(plain(rows), indent=2))
        return
    last = "top-1" if hosts is None else "by"
    table = Table("run", "state", "exit", "nodes", last, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(
            row.run,
            Text(row.state, style=_STYLES.get(row.state, "")),
            "" if row.exit_code is None else str(row.exit_code),
            Text(", ".join(row.nodes)),
            Text(row.started_by) if row.top1 is None else f"{row.top1:.2f}",
        )
    terminal.console(soft_wrap=False).print(table if rows else "no runs yet: launcher up JOB")


def _on_record(ssh_config: Path | None) -> list[RunRow]:
    rows, records = [], store.records()
    seen = _seen_by_nodes([record for record in records if record.result() is None], ssh_config)
    for record in records:
        result = record.result() or {"state": seen[record.run]}
        names = tuple(node.name for node in record.nodes())
        rows.append(RunRow(record.run, result["state"], result.get("exit_code"), names, top1(result.get("last") or {})))
    return rows


def _seen_by_nodes(records: Sequence[Record], ssh_config: Path | None) -> dict[RunId, str]:
    """The states of these runs on their nodes; `unreachable` where those that answer cannot tell."""
    hosts = sorted({node.host for record in records for node in record.nodes()})
    with connect([(h, h) for h in hosts], ssh_config=ssh_config, allow_failures=True, timeout=RUNS_TIMEOUT) as fleet:
        found = on_nodes(fleet, Reporter().log)
    seen = {}
    for record in records:
        states, nodes = [f.state for f in found.get(record.run, ())], record.nodes()
        state = of_containers(states, len(nodes), record.min_nodes).value if states else "removed"
        silent = any(node.host in fleet.failed for node in nodes)
        seen[record.run] = "unreachable" if silent and state in ("removed", "lost") else state
    return seen


def _on_nodes(hosts: list[str], ssh_config: Path | None) -> list[RunRow]:
    rows = []
    with connect([(host, host) for host in hosts], ssh_config=ssh_config) as fleet:
        for run, found in on_nodes(fleet, Reporter().log).items():
            states, told = [f.state for f in found], found[0].labels
            code = next((state.exit_code for state in states if state.exit_code), states[0].exit_code)
            names = tuple(f.labels.node for f in found)
            state = of_containers(states, told.nodes, told.min_nodes).value
            rows.append(RunRow(run, state, code, names, started_by=told.started_by))
    return rows
