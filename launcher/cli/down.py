"""`launcher down`: stop a run and remove its containers from every node."""

from __future__ import annotations

import json as json_
from collections.abc import Sequence
from functools import cache
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

import launcher
from launcher.api.run import known_runs
from launcher.cli import options
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NotConfirmed, UsageError
from launcher.model import labels
from launcher.run.stop import EndedContainer, Removed, not_confirmed


def down(
    run: options.Run = None,
    all_: Annotated[bool, typer.Option("--all", help="Stop all runs recorded here.")] = False,
    purge: Annotated[bool, typer.Option("--purge", help="Also delete the output folders on the nodes.")] = False,
    any_owner: Annotated[bool, typer.Option("--any-owner", help="Also stop the run of another user.")] = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Fetch logs and TensorBoard logs, send SIGTERM, wait 45 s for a checkpoint,
    then send SIGKILL. The command can be repeated safely.

    Runs of other users are not stopped, nor are runs that the same account
    started from another machine, unless they are named. Exit code 6 if a node
    did not confirm or was left out of --nodes: run the same command again to
    finish.

    Example: launcher down imagenet
    """
    report = Reporter()
    log = cache(report.log)  # each note once, for any number of runs
    hosts = options.hosts(nodes)
    names: list[str | None] = [run]
    if all_:
        names = [*known_runs(nodes=hosts, cluster=on, ssh_config=ssh_config, log=log)]
    results: list[dict[str, object]] = []
    errors: list[LauncherError] = []
    for name in names:
        try:
            with launcher.find(name, nodes=hosts, cluster=on, ssh_config=ssh_config, log=log) as found:
                removed, failed = _end(found, purge=purge, any_owner=any_owner, own_only=all_ or name is None)
        except LauncherError as error:
            if not all_:
                raise
            if isinstance(error, UsageError):
                log(f"skipped: {error}")  # another user's run
            else:
                errors.append(error)  # the other runs are stopped anyway
            continue
        results.append({"run": found.id, "nodes": [_removed(r) for r in removed], "failed": [str(e) for e in failed]})
        errors += failed
        if not json:
            _print(report.err, found.id, removed, confirmed=not failed)
    if json:
        typer.echo(json_.dumps(results, indent=2))
    if errors:
        raise not_confirmed((), errors)


def _end(run: launcher.Run, **how: bool) -> tuple[Sequence[Removed], Sequence[LauncherError]]:
    """Return what was removed, and the errors of nodes that did not confirm."""
    try:
        return run.down(**how), ()
    except NotConfirmed as error:
        return error.removed, error.errors


def _removed(removed: Removed) -> dict[str, object]:
    containers = [
        {"name": c.state.name, "exit_code": c.state.exit_code, "stopped": c.stopped} for c in removed.containers
    ]
    return {"node": removed.node, "containers": containers, "swept": list(removed.swept)}


def _print(console: Console, run: str, removed: Sequence[Removed], *, confirmed: bool) -> None:
    for node in removed:
        shown = [_ended(c) for c in node.containers if c.state.labels.get(labels.PURPOSE) != "claim"]
        swept = f", also removed {', '.join(node.swept)}" if node.swept else ""
        console.print(f"{escape(node.node)}: {escape(', '.join(shown) or 'nothing to remove')}{escape(swept)}")
    if confirmed:
        console.print(f"[bold]down[/] {run}")


def _ended(container: EndedContainer) -> str:
    state = container.state
    how = "stopped" if container.stopped else "never started" if state.exit_code is None else f"exit {state.exit_code}"
    return f"{state.name} ({how})"
