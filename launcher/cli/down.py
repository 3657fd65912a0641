"""`launcher down`: stop a run and remove what it left, on every node; 0 only when every node confirmed."""

from __future__ import annotations

import json as json_
from collections.abc import Callable
from functools import cache, partial
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from launcher.cli import options
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NodesFailed, NotConfirmed, UsageError
from launcher.model import labels
from launcher.node import output_folder
from launcher.node.connect import connect
from launcher.node.parallel import run_all
from launcher.records import store
from launcher.records.collect import output_folders
from launcher.run.locate import Attached, attach, on_nodes
from launcher.run.owner import Owner
from launcher.run.state import RunState, of_containers
from launcher.run.stop import EndedContainer, Removed, stop


def down(
    run: options.Run = None,
    all_: Annotated[bool, typer.Option("--all", help="Every run that is on record here.")] = False,
    purge: Annotated[bool, typer.Option("--purge", help="The output folders on the nodes too.")] = False,
    any_owner: Annotated[bool, typer.Option("--any-owner", help="Another user's run too.")] = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """SIGTERM, 45 s for a checkpoint, SIGKILL; logs and curves are fetched first. Doing it twice does no harm.

    Another user's run is left alone; so is one that the same account started from elsewhere, unless it is named.
    Exit code 6 where a node did not confirm; the same command again finishes the job.
    """
    reporter = Reporter()
    log = cache(reporter.log)  # a note once, however many runs are looked for
    hosts, names = options.hosts(nodes, on), [run]
    if all_ and hosts is None:
        names = [record.run for record in store.records()]
    elif all_:
        with connect([(h, h) for h in hosts or ()], ssh_config=ssh_config, allow_failures=True) as fleet:
            names = list(on_nodes(fleet, log))
    results: list[dict[str, object]] = []
    errors: list[LauncherError] = []
    for name in names:
        try:
            with attach(name, hosts, ssh_config, log, claims=True, any_owner=any_owner) as attached:
                if not any_owner:
                    _require_own(attached, named=name is not None and not all_)
                removed, failed = _end(attached, reporter.warn, purge=purge)
        except LauncherError as error:
            if not all_:
                raise
            if isinstance(error, UsageError):
                log(f"left alone: {error}")  # another user's run
            else:
                errors.append(error)  # of this run: the others are ended all the same
            continue
        results.append(
            {"run": attached.record.run, "nodes": [_row(r) for r in removed], "failed": [str(e) for e in failed]}
        )
        errors += failed
        if not json:
            _print(reporter.err, attached.record.run, removed)
    if json:
        typer.echo(json_.dumps(results, indent=2))
    if errors:
        words = "not every node confirmed:\n" + str(NodesFailed(errors))
        raise NotConfirmed("down", words, "repeat it when they are back")


def _require_own(attached: Attached, *, named: bool) -> None:
    """Raises UsageError."""
    run = attached.record.run
    if attached.owner is Owner.OTHER:
        what = f"belongs to another user: {attached.started_by}"
        raise UsageError(run, what, f"to stop it all the same: launcher down {run} --any-owner")
    if attached.owner is Owner.ACCOUNT and not named:
        what = f"was started by another caller with the same account: {attached.started_by}"
        raise UsageError(run, what, f"to stop it, name it: launcher down {run}")


def _end(attached: Attached, warn: Callable[[str], None], *, purge: bool) -> tuple[list[Removed], list[LauncherError]]:
    """Stop and remove on the nodes that answer; what was removed, and why others did not."""
    record, errors = attached.record, list(attached.unreachable.values())
    removed: list[Removed] = []
    try:
        into = None if attached.owner is Owner.OTHER else record  # another user's files are not ours to read
        removed = stop(attached.fleet, record.run, into=into, warn=warn, listed=attached.listed)
        if purge:
            folders = output_folders(attached.engines, attached.nodes)
            run_all([partial(output_folder.remove, folder.files, folder.path, record.run) for folder in folders])
    except NodesFailed as error:
        errors += error.errors
    record.event("down", removed=[r.node for r in removed], failed=[str(e) for e in errors])
    if record.result() is None and not errors:  # the launcher did not see its end: stopped, where it still ran
        state = of_containers(list(attached.states.values()), len(attached.nodes), record.min_nodes)
        ended = state if state.ended and attached.states else RunState.STOPPED
        if problem := record.finish({"run": record.run, "state": ended.value, "exit_code": ended.exit_code}):
            warn(problem)
    return removed, errors


def _row(removed: Removed) -> dict[str, object]:
    containers = [
        {"name": c.state.name, "exit_code": c.state.exit_code, "stopped": c.stopped} for c in removed.containers
    ]
    return {"node": removed.node, "containers": containers, "swept": list(removed.swept)}


def _print(console: Console, run: str, removed: list[Removed]) -> None:
    for node in removed:
        shown = [_ended(c) for c in node.containers if c.state.labels.get(labels.PURPOSE) != "claim"]
        swept = f", swept {', '.join(node.swept)}" if node.swept else ""
        console.print(f"{escape(node.node)}: {escape(', '.join(shown) or 'nothing left of it')}{escape(swept)}")
    console.print(f"[bold]down[/] {run}")


def _ended(container: EndedContainer) -> str:
    state = container.state
    how = "stopped" if container.stopped else "never started" if state.exit_code is None else f"exit {state.exit_code}"
    return f"{state.name} ({how})"
