"""`launcher fetch`: the run's files here."""

from __future__ import annotations

import json as json_
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import options
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NodesFailed, NoRoomHere
from launcher.records.collect import Collected, collect, output_folders
from launcher.run.locate import Attached, attach
from launcher.run.worlds import collected, newest


def fetch(
    run: options.Run = None,
    dest: Annotated[Path | None, typer.Argument(help="A folder; default runs/<run id>.")] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Checkpoints too.")] = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """TensorBoard logs, metrics, error files and rank logs of every node. Only what is new travels."""
    with attach(run, options.hosts(nodes, on), ssh_config, Reporter().log) as attached:
        target = dest or attached.record.paths.root
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        moved = fetch_files(attached, target, Reporter().warn, checkpoints=checkpoints)
    if json:
        typer.echo(json_.dumps({"run": attached.record.run, "folder": str(target), "bytes": moved}))
    else:
        typer.echo(f"{attached.record.run}: {moved:,} bytes are new in {target}/")
    attached.require_all()


def fetch_files(
    attached: Attached, target: Path, warn: Callable[[str], None] = lambda _: None, *, checkpoints: bool = False
) -> int:
    """Bytes that were new on the nodes that answer. warn: called with each file of a node that could not be read.

    Raises NodesFailed where nothing of one could be collected, or this machine's disk is full.
    """
    if unmasked := attached.record.unmasked:
        warn(unmasked)
    folders = output_folders(attached.engines, attached.nodes)
    if checkpoints and attached.record.min_nodes:  # those of the nodes that took part to the end come first
        collect(folders, target, mask=attached.record.mask)
        world = newest(collected(target, attached.nodes))
        folders.sort(key=lambda folder: world is None or folder.node not in world.members)
    results = collect(folders, target, mask=attached.record.mask, checkpoints=checkpoints)
    done = [result for result in results if isinstance(result, Collected)]
    failures = [result for result in results if isinstance(result, LauncherError)]
    for problem in (problem for one in done for problem in one.problems):
        if isinstance(problem, NoRoomHere):
            failures.append(problem)
        else:
            warn(str(problem))
    if failures:
        raise NodesFailed(failures)
    return sum(one.moved for one in done)
