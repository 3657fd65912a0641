"""`launcher fetch`: the run's files here."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import options
from launcher.cli.reporter import Reporter
from launcher.errors import LauncherError, NodesFailed
from launcher.records.collect import collect, output_folders
from launcher.run.locate import Attached, attach


def fetch(
    run: options.Run = None,
    dest: Annotated[Path | None, typer.Argument(help="A folder; default runs/<run id>.", show_default=False)] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Checkpoints too.")] = False,
    nodes: options.Nodes = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """TensorBoard logs, metrics, error files and rank logs of every node. Only what is new travels."""
    with attach(run, options.hosts(nodes), ssh_config, Reporter().log) as attached:
        target = dest or attached.record.paths.root
        target.mkdir(parents=True, exist_ok=True)
        moved = fetch_files(attached, target, checkpoints=checkpoints)
    if json:
        typer.echo(json_.dumps({"run": attached.record.run, "folder": str(target), "bytes": moved}))
    else:
        typer.echo(f"{attached.record.run}: {moved:,} bytes are new in {target}/")
    attached.require_all()


def fetch_files(attached: Attached, target: Path, *, checkpoints: bool = False) -> int:
    """Bytes that were new on the nodes that answer. Raises NodesFailed where files of one could not be collected."""
    results = collect(output_folders(attached.engines, attached.nodes), target, checkpoints=checkpoints)
    failures = [result for result in results if isinstance(result, LauncherError)]
    if failures:
        raise NodesFailed(failures, of=len(results))
    return sum(result for result in results if isinstance(result, int))
