"""`launcher clean`: list leftovers of old runs on nodes, then remove them."""

from __future__ import annotations

import json as json_
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import typer

from launcher.cli import options, terminal
from launcher.errors import NodesFailed, UsageError
from launcher.model.facts import ImageInfo
from launcher.node.connect import caller_engine, connect
from launcher.node.engine import Engine
from launcher.node.parallel import run_all
from launcher.records import store
from launcher.run.leftovers import Leftovers, find_leftovers, remove_leftovers


def clean(
    nodes: options.Nodes = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """List leftovers and ask before removing them: unused images that launcher
    built, output folders (including checkpoints) of runs without a container,
    containers of runs that `down` stopped while the node was unreachable, and
    containers of a killed `doctor --bench` or `shell`.

    By default, all nodes of the runs recorded here are checked. Without a
    terminal and without --yes, leftovers are only listed.

    Example: launcher clean --nodes gpu-a,gpu-b
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
            lines = [line for leftovers in found for line in _lines(leftovers)] or ["nothing to remove"]
            typer.echo(terminal.escaped("\n".join(lines)))
        if any(found) and not yes and not sys.stdin.isatty():
            typer.echo("nothing was removed; to remove the listed items, use --yes", err=True)
        elif any(found) and (yes or typer.confirm("Remove all of these?")):
            run_all([partial(remove_leftovers, leftovers) for leftovers in found])
            typer.echo("removed", err=True)
        failed = [*fleet.failed.values(), *(leftovers.unread for leftovers in found if leftovers.unread)]
        if failed:
            raise NodesFailed(failed, of=len(hosts))


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
        *(f"{node}: container {container.name} of a stopped run" for container in found.containers),
        *(f"{node}: image {_name(image)}  {image.size >> 20} MiB" for image in found.images),
        *(f"{node}: {out.path}  {out.files} files, {out.size >> 20} MiB" for out in found.outputs),
    ]
