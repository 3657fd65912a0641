"""`launcher down`: stop a run and remove what it left, on every node; 0 only when every node confirmed."""

from __future__ import annotations

import json as json_
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from launcher.cli import options
from launcher.errors import LauncherError, NodesFailed, NotConfirmed
from launcher.node.connect import connect
from launcher.node.parallel import run_all
from launcher.records import store
from launcher.records.collect import output_folders
from launcher.records.store import Record
from launcher.run.locate import Attached, attach, on_nodes
from launcher.run.state import RunState, of_containers
from launcher.run.stop import Removed, stop


def down(
    run: options.Run = None,
    all_: Annotated[bool, typer.Option("--all", help="Every run that is on record here.")] = False,
    purge: Annotated[bool, typer.Option("--purge", help="The output folders on the nodes too.")] = False,
    nodes: options.Nodes = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """SIGTERM, 45 s for a checkpoint, SIGKILL; logs and curves are brought here first. Doing it twice does no harm.

    Exit code 6 where a node did not confirm; the same command again finishes the job.
    """
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    names: list[str | None] = [record.run for record in store.records()] if all_ and nodes is None else [run]
    if all_ and nodes is not None:
        names = _all_on(nodes, ssh_config)
    results, errors = [], []
    for name in names:
        with attach(name, options.hosts(nodes), ssh_config) as attached:
            removed, failed = end(attached, purge=purge)
        results.append(
            {"run": attached.record.run, "nodes": [_row(r) for r in removed], "failed": [str(e) for e in failed]}
        )
        errors += failed
        if not json:
            _print(err, attached.record.run, removed)
    if json:
        typer.echo(json_.dumps(results, indent=2))
    if errors:
        raise NotConfirmed(
            "down", "not every node confirmed:\n" + str(NodesFailed(errors)), "repeat it when they are back"
        )


def end(attached: Attached, *, purge: bool) -> tuple[list[Removed], list[LauncherError]]:
    """Stop and remove on the nodes that answer; what was removed, and why others did not."""
    record, errors = attached.record, list(attached.unreachable.values())
    folders = output_folders(attached.engines, attached.nodes)
    removed: list[Removed] = []
    try:
        removed = stop(attached.fleet, record.run, into=record.paths.root)
        if purge:
            run_all([partial(folder.files.remove_tree, folder.path) for folder in folders])
    except NodesFailed as error:
        errors += error.errors
    _note(record, attached, removed, errors)
    return removed, errors


def _note(record: Record, attached: Attached, removed: list[Removed], errors: list[LauncherError]) -> None:
    """The result of a run that nobody has seen to end: stopped, where it still ran."""
    record.event("down", removed=[r.node for r in removed], failed=[str(e) for e in errors])
    if record.result() is None and not errors:
        state = of_containers(list(attached.states.values()), len(attached.nodes))
        ended = state if state.ended and attached.states else RunState.STOPPED
        record.finish({"run": record.run, "state": ended.value, "exit_code": ended.exit_code})


def _all_on(nodes: str, ssh_config: Path | None) -> list[str | None]:
    hosts = options.hosts(nodes) or []
    with connect([(h, h) for h in hosts], ssh_config=ssh_config, allow_failures=True) as fleet:
        return list(on_nodes(fleet))


def _row(removed: Removed) -> dict[str, object]:
    return {
        "node": removed.node,
        "containers": [{"name": s.name, "exit_code": s.exit_code} for s in removed.containers],
        "swept": list(removed.swept),
    }


def _print(console: Console, run: str, removed: list[Removed]) -> None:
    for node in removed:
        what = ", ".join(f"{s.name} (exit {s.exit_code})" for s in node.containers) or "nothing left of it"
        console.print(
            f"{escape(node.node)}: {escape(what)}" + (f", swept {', '.join(node.swept)}" if node.swept else "")
        )
    console.print(f"[bold]down[/] {run}")
