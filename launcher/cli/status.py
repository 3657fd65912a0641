"""`launcher status` and `launcher runs`: what the nodes say now, and what is on record."""

from __future__ import annotations

import json as json_
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher.cli import options
from launcher.cli.screen import duration, top1
from launcher.errors import LauncherError
from launcher.logs.follow import size_of
from launcher.model import labels
from launcher.model.container import ContainerState
from launcher.node.connect import connect
from launcher.node.engine import Files
from launcher.records import store
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun
from launcher.run import attempts
from launcher.run.attempts import Attempt
from launcher.run.locate import Attached, attach, on_nodes
from launcher.run.state import of_containers

REFRESH = 2.0
_TAIL = 8192


def status(
    run: options.Run = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep it up to date until Ctrl-C.")] = False,
    nodes: options.Nodes = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """What the nodes say now; a node that does not answer is shown as unreachable (exit code 3)."""
    console = Console(highlight=False)
    with attach(run, options.hosts(nodes), ssh_config) as attached:
        seen = look(attached)
        if watch and not json:
            _watch(attached, console)
        elif json:
            typer.echo(json_.dumps(seen, indent=2))
        else:
            console.print(_render(seen))
        if attached.unreachable:
            for error in attached.unreachable.values():
                typer.echo(str(error), err=True)
            raise typer.Exit(3)


def look(attached: Attached) -> dict[str, Any]:
    """A run as its nodes show it now."""
    states = {
        node.name: state
        for node in attached.nodes
        for state in attached.engines[node.name].list({labels.RUN: attached.record.run, labels.NODE: node.name})
    }
    result = attached.record.result()
    state = of_containers(list(states.values()), len(attached.nodes)).value if states else "removed"
    if result is not None and state in ("removed", "done", "failed", "lost"):
        state = str(result["state"])
    progress = _progress(attached)
    ends = {str(row.get("node")): row for row in (result or {}).get("nodes", [])}
    rows = [
        _row(node, states.get(node.name), ends.get(node.name, {}), _attempts(attached, node)) for node in attached.nodes
    ]
    rows += [
        {"node": name, "state": "unreachable", "reason": str(error)} for name, error in attached.unreachable.items()
    ]
    return {"run": attached.record.run, "state": state, "progress": progress, "nodes": rows, "result": result}


def _attempts(attached: Attached, node: NodeOfRun) -> tuple[Attempt, ...]:
    try:
        return attempts.read(attached.engines[node.name].files, node.output, node.name)
    except LauncherError:
        return ()  # went away since it was asked for its containers


def _row(
    node: NodeOfRun, state: ContainerState | None, end: Mapping[str, Any], started: tuple[Attempt, ...]
) -> dict[str, Any]:
    """end: what was written down of the node when the run ended, for when its container is no longer there."""
    row: dict[str, Any] = {
        "node": node.name,
        "host": node.host,
        "node_rank": node.rank,
        "ranks": [node.ranks.start, node.ranks.stop - 1],
    }
    if state is None:
        kept = {key: end.get(key) for key in ("exit_code", "oom_killed", "restarts", "restarted")}
        return {**row, "state": "removed", **kept}
    until = state.finished if state.phase.ended and state.finished else time.time()
    return {
        **row,
        "state": state.phase.value,
        "exit_code": state.exit_code,
        "oom_killed": state.oom_killed,
        "restarts": max(0, len(started) - 1),
        "restarted": attempts.reasons(started),
        "age": round(until - state.started, 1) if state.started else None,
        "gpus": [g for g in state.labels.get(labels.GPUS, "").split(labels.SPLIT) if g],
        "container": state.name,
    }


def _progress(attached: Attached) -> Mapping[str, Any]:
    """The last line of kind "step" of the master's metrics; {} where there is none."""
    if not attached.nodes or attached.nodes[0].rank != 0:
        return {}
    master = attached.nodes[0]
    path = NodePaths(master.output, master.name).metrics
    try:
        text = _end_of(attached.engines[master.name].files, path)
    except LauncherError:
        return {}
    for line in reversed(text.splitlines()):
        try:
            value = json_.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and value.get("kind") == "step":
            return value
    return {}


def _end_of(files: Files, path: str) -> str:
    size = size_of(files, path)
    return files.read(path, max(0, size - _TAIL), _TAIL).decode("utf-8", "replace") if size else ""


def _render(seen: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("node", "ranks", "state", "exit", "restarts", "age", "gpus"):
        table.add_column(column)
    for row in seen["nodes"]:
        low, high = row.get("ranks", (None, None))
        exit_code = row.get("exit_code")
        table.add_row(
            Text(str(row["node"])),
            "" if low is None else (str(low) if low == high else f"{low}-{high}"),
            Text(str(row["state"]), style=_STYLES.get(str(row["state"]), "")),
            ("" if exit_code is None else str(exit_code)) + (" OOM" if row.get("oom_killed") else ""),
            str(row.get("restarts") or 0),
            duration(row["age"]) if row.get("age") is not None else "",
            str(len(row.get("gpus", []))),
        )
    head = Text(f"{seen['run']}  ", style="bold") + Text(str(seen["state"]), style=_STYLES.get(str(seen["state"]), ""))
    parts: list[RenderableType] = [head]
    if step := seen["progress"]:
        parts.append(Text("  ".join(f"{name} {_short(step[name])}" for name in _SHOWN if name in step)))
    why = [
        Text(f"{row['node']}: restart {place} after {reason}", style="yellow")
        for row in seen["nodes"]
        for place, reason in enumerate(row.get("restarted") or (), 1)
    ]
    return Group(*parts, table, *why)


_SHOWN = ("epoch", "epochs", "step", "steps", "images_per_s", "data_wait", "loss")
_STYLES = {"running": "green", "done": "green", "failed": "red", "unreachable": "red", "stopped": "yellow"}


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _watch(attached: Attached, console: Console) -> None:
    with Live(console=console, auto_refresh=False, screen=False) as live:
        try:
            while True:
                seen = look(attached)
                live.update(_render(seen), refresh=True)
                if seen["state"] in ("done", "failed", "stopped", "lost", "removed"):
                    return
                time.sleep(REFRESH)
        except KeyboardInterrupt:
            return


def runs(nodes: options.Nodes = None, json: options.Json = False, ssh_config: options.SshConfig = None) -> None:
    """What is on record here; with --nodes, what the labels on those nodes tell."""
    rows = _on_nodes(options.hosts(nodes) or [], ssh_config) if nodes is not None else _on_record()
    if json:
        typer.echo(json_.dumps(rows, indent=2))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "state", "exit", "nodes", "top-1"):
        table.add_column(column)
    for row in rows:
        accuracy = row.get("top1")
        table.add_row(
            row["run"],
            Text(row["state"], style=_STYLES.get(row["state"], "")),
            "" if row["exit_code"] is None else str(row["exit_code"]),
            Text(", ".join(row["nodes"])),
            "" if accuracy is None else f"{accuracy:.2f}",
        )
    Console(highlight=False).print(table if rows else "no runs yet: launcher up JOB")


def _on_record() -> list[dict[str, Any]]:
    rows = []
    for record in store.records():
        result = record.result() or {}
        rows.append(
            {
                "run": record.run,
                "state": result.get("state", "not ended, as far as is known here"),
                "exit_code": result.get("exit_code"),
                "nodes": [node.name for node in record.nodes()],
                "top1": top1(result.get("last") or {}),
            }
        )
    return rows


def _on_nodes(hosts: list[str], ssh_config: Path | None) -> list[dict[str, Any]]:
    with connect([(host, host) for host in hosts], ssh_config=ssh_config) as fleet:
        rows = []
        for run, found in on_nodes(fleet).items():
            states = [f.state for f in found]
            whole = len(states[0].labels[labels.NODES].split(labels.SPLIT))
            codes = [state.exit_code for state in states if state.exit_code]
            rows.append(
                {
                    "run": run,
                    "state": of_containers(states, whole).value,
                    "exit_code": codes[0] if codes else states[0].exit_code,
                    "nodes": [f.node.name for f in found],
                }
            )
        return rows
