"""`launcher down`: stop a run and remove what it left, on every node. `launcher clean`: what old runs left."""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from launcher.cli import options, terminal
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NodesFailed, NotConfirmed, UsageError
from launcher.model import labels
from launcher.model.facts import ImageInfo
from launcher.node import output_folder
from launcher.node.connect import caller_engine, connect
from launcher.node.engine import Engine
from launcher.node.parallel import run_all
from launcher.records import store
from launcher.records.collect import output_folders
from launcher.run.leftovers import Leftovers, find_leftovers, remove_leftovers
from launcher.run.locate import Attached, Owner, attach, on_nodes
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
            {"run": attached.record.run, "nodes": [_removed(r) for r in removed], "failed": [str(e) for e in failed]}
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
        if problem := record.finish({"state": ended, "exit_code": ended.exit_code}):
            warn(problem)
    return removed, errors


def _removed(removed: Removed) -> dict[str, object]:
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


def clean(
    nodes: options.Nodes = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without a question.")] = False,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Images that launcher built and nothing uses, and output folders (checkpoints too) of runs without a container.

    Also what has come back of a run that `down` has ended while the node did not answer.

    Default nodes: those of the runs recorded here. Without a terminal and without --yes it only lists.
    """
    hosts = options.hosts(nodes) or list(dict.fromkeys(n.host for record in store.records() for n in record.nodes()))
    if not hosts:
        raise UsageError("launcher clean", "no run is recorded here", "name the nodes: --nodes a,b")
    with connect([(host, host) for host in hosts], ssh_config=ssh_config, allow_failures=True) as fleet:
        named = [image for images in fleet.each(_images) for image in images if image.tags]
        with caller_engine() as here:
            sources = [*named, *(_images(here) if here else ())]
        down = {record.run for record in store.records() if record.taken_down}
        found = fleet.each(partial(find_leftovers, sources=sources, taken_down=down))
        if json:
            typer.echo(json_.dumps([_leftovers(leftovers) for leftovers in found], indent=2))
        else:
            lines = [line for leftovers in found for line in _lines(leftovers)] or ["nothing left over"]
            typer.echo(terminal.escaped("\n".join(lines)))
        if any(found) and not yes and not sys.stdin.isatty():
            typer.echo("nothing was removed: --yes removes what is listed", err=True)
        elif any(found) and (yes or typer.confirm("Remove all of it?")):
            run_all([partial(remove_leftovers, leftovers) for leftovers in found])
            typer.echo("removed", err=True)
        if fleet.failed:
            raise NodesFailed(list(fleet.failed.values()), of=len(hosts))


def _images(engine: Engine) -> Sequence[ImageInfo]:
    return engine.images.list({}) if engine.images else ()


def _leftovers(leftovers: Leftovers) -> dict[str, object]:
    return {
        "node": leftovers.engine.node,
        "containers": [container.name for container in leftovers.containers],
        "images": [{"name": _name(image), "bytes": image.size} for image in leftovers.images],
        "outputs": [{"path": out.path, "files": out.files, "bytes": out.size} for out in leftovers.outputs],
    }


def _name(image: ImageInfo) -> str:
    return ", ".join(image.tags) or image.id[7:19]


def _lines(found: Leftovers) -> list[str]:
    node = found.engine.node
    return [
        *(f"{node}: container {container.name} of a run that was ended" for container in found.containers),
        *(f"{node}: image {_name(image)}  {image.size >> 20} MiB" for image in found.images),
        *(f"{node}: {out.path}  {out.files} files, {out.size >> 20} MiB" for out in found.outputs),
    ]
