"""`launcher clean`: what old runs left on nodes, listed first, then removed."""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from launcher.cli import options
from launcher.errors import NodesFailed, UsageError
from launcher.node.connect import connect
from launcher.records import store
from launcher.run.clean import Dirt, find, remove


def clean(
    nodes: options.Nodes = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without a question.")] = False,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Images that we made and nobody uses, and output folders (checkpoints too) of runs without a container.

    Default nodes: those of the runs on record here. Without a terminal and without --yes it only lists.
    """
    hosts = options.hosts(nodes) or _known_hosts()
    with connect([(host, host) for host in hosts], ssh_config=ssh_config, allow_failures=True) as fleet:
        found = fleet.each(find)
        if json:
            typer.echo(json_.dumps([_row(dirt) for dirt in found], indent=2))
        else:
            _print(found)
        if any(dirt.images or dirt.outputs for dirt in found) and _agreed(yes=yes):
            fleet.each(lambda engine: remove(next(dirt for dirt in found if dirt.engine is engine)))
            typer.echo("removed", err=True)
        if fleet.failed:
            raise NodesFailed(list(fleet.failed.values()), of=len(hosts))


def _known_hosts() -> list[str]:
    hosts = dict.fromkeys(node.host for record in store.records() for node in record.nodes())
    if not hosts:
        raise UsageError("launcher clean", "no run is on record here", "name the nodes: --nodes a,b")
    return list(hosts)


def _agreed(*, yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        typer.echo("nothing was removed: --yes removes what is listed", err=True)
        return False
    return typer.confirm("Remove all of it?")


def _row(dirt: Dirt) -> dict[str, object]:
    return {
        "node": dirt.engine.node,
        "images": [{"name": image.name, "bytes": image.image.size} for image in dirt.images],
        "outputs": [{"path": out.path, "files": out.files, "bytes": out.size} for out in dirt.outputs],
    }


def _print(found: Sequence[Dirt]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for dirt in found:
        for image in dirt.images:
            console.print(f"{escape(dirt.engine.node)}: image {escape(image.name)}  {image.image.size >> 20} MiB")
        for out in dirt.outputs:
            console.print(f"{escape(dirt.engine.node)}: {escape(out.path)}  {out.files} files, {out.size >> 20} MiB")
    if not any(dirt.images or dirt.outputs for dirt in found):
        console.print("nothing left over")
