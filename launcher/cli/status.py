"""`launcher status` and `launcher runs`: what the nodes say now, and what is on record."""

from __future__ import annotations

import json as json_
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher.cli import options
from launcher.cli.logs import known_secrets
from launcher.cli.screen import duration, top1
from launcher.logs.lines import Masker
from launcher.model import labels
from launcher.node.connect import connect
from launcher.records import store
from launcher.run.locate import Attached, attach, on_nodes
from launcher.run.look import look
from launcher.run.state import of_containers

REFRESH = 2.0
LAST_LINE = 60  # characters of it that a table of a narrow terminal still shows


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
        masker = Masker(known_secrets(attached.record))
        seen = _watch(attached, masker, console) if watch and not json else _masked(look(attached), masker)
        if json:
            typer.echo(json_.dumps(seen, indent=2))
        elif not watch:
            console.print(_render(seen))
        reasons = [str(row["reason"]) for row in seen["nodes"] if "reason" in row]
        for reason in reasons:
            typer.echo(reason, err=True)
        if reasons:
            raise typer.Exit(3)


def _masked(seen: dict[str, Any], masker: Masker) -> dict[str, Any]:
    return {
        **seen,
        "nodes": [{**row, **({"last": masker(row["last"])} if "last" in row else {})} for row in seen["nodes"]],
    }


def _render(seen: Mapping[str, Any]) -> RenderableType:
    """The table, without the columns that have nothing to say here."""
    rows = [_cells(row, seen["progress"]) for row in seen["nodes"]]
    shown = [column for column in COLUMNS if column in ALWAYS or any(str(cells[column]) for cells in rows)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in shown:
        table.add_column(column, no_wrap=column in ("last line", *ALWAYS), overflow="ellipsis")
    for cells in rows:
        table.add_row(*(cells[column] for column in shown))
    state = str(seen["state"])
    head = Text(f"{seen['run']}  ", style="bold") + Text(state, style=_STYLES.get(state, ""))
    why = [
        Text(f"{row['node']}: restart {place} after {reason}", style="yellow")
        for row in seen["nodes"]
        for place, reason in enumerate(row.get("restarted") or (), 1)
    ]
    return Group(head, table, *why)


def _cells(row: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Text | str]:
    """How far the run is stands in the row of rank 0, which tells it for all of them."""
    state = str(row["state"])
    step = progress if row.get("node_rank") == 0 else {}
    return {
        "node": Text(str(row["node"])),
        "ranks": _span(row.get("ranks")),
        "state": Text(state, style=_STYLES.get(state, "")),
        "exit": _exit(row),
        "restarts": str(row.get("restarts") or 0),
        "age": duration(row["age"]) if row.get("age") is not None else "",
        "epoch": _of(step, "epoch", "epochs"),
        "step": _of(step, "step", "steps"),
        "images/s": _short(step.get("images_per_s", "")),
        "data wait": _percent(step.get("data_wait")),
        "loss": _short(step.get("loss", "")),
        "GPUs": _gpus(row),
        "memory": _memory(row.get("use")),
        "last line": Text(str(row.get("last") or "")[:LAST_LINE]),
    }


COLUMNS = (
    *("node", "ranks", "state", "exit", "restarts", "age", "epoch", "step", "images/s", "data wait", "loss"),
    *("GPUs", "memory", "last line"),
)
ALWAYS = ("node", "ranks", "state", "restarts")
_STYLES = {"running": "green", "done": "green", "failed": "red", "unreachable": "red", "stopped": "yellow"}


def _span(ranks: Sequence[int] | None) -> str:
    if not ranks:
        return ""
    low, high = ranks
    return str(low) if low == high else f"{low}-{high}"


def _exit(row: Mapping[str, Any]) -> str:
    code = row.get("exit_code")
    return ("" if code is None else str(code)) + (" OOM" if row.get("oom_killed") else "")


def _of(progress: Mapping[str, Any], now: str, all_: str) -> str:
    if now not in progress:
        return ""
    return f"{progress[now]}/{progress[all_]}" if all_ in progress else str(progress[now])


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _percent(share: object) -> str:
    return f"{share:.0%}" if isinstance(share, (int, float)) else ""


def _gpus(row: Mapping[str, Any]) -> str:
    """`8: 91-98 %, 14.2/16 GiB`."""
    count = len(row.get("gpus", []))
    seen = (row.get("use") or {}).get("gpus", [])
    busy = sorted(gpu["busy"] for gpu in seen if gpu["busy"] is not None)
    fullest = max((gpu for gpu in seen if gpu["memory"] is not None), key=lambda gpu: int(gpu["memory"]), default=None)
    if not busy or fullest is None:
        return str(count) if count else ""
    share = f"{busy[0]}" if busy[0] == busy[-1] else f"{busy[0]}-{busy[-1]}"
    return f"{count}: {share} %, {fullest['memory'] / 1024:.1f}/{(fullest['memory_total'] or 0) / 1024:.0f} GiB"


def _memory(seen: Mapping[str, Any] | None) -> str:
    if not seen or not seen["memory_total"]:
        return ""
    return f"{seen['memory'] / 2**30:.1f}/{seen['memory_total'] / 2**30:.0f} GiB"


def _watch(attached: Attached, masker: Masker, console: Console) -> dict[str, Any]:
    """Until the run has ended, or Ctrl-C; what was seen last."""
    seen = _masked(look(attached), masker)
    with Live(_render(seen), console=console, auto_refresh=False) as live:
        try:
            while seen["state"] not in ("done", "failed", "stopped", "lost", "removed"):
                time.sleep(REFRESH)
                seen = _masked(look(attached), masker)
                live.update(_render(seen), refresh=True)
        except KeyboardInterrupt:
            pass
    return seen


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
