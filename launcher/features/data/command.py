"""`launcher data push | ls | verify | rm`: manage data sets on nodes, without a job."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from launcher.cli import completion, options, terminal
from launcher.cli.commands import Command, Group
from launcher.cli.long_work import LongWork
from launcher.cli.terminal import Reporter
from launcher.errors import DataFailed, LauncherError, NodesFailed, UsageError
from launcher.features.data.distribution import DataNode, Distributed, distribute, with_image_of_copy
from launcher.features.data.download import HERE, Variables, here
from launcher.features.data.locations import Copy, copies, parse_source, remove, root_of, select, source_named
from launcher.features.data.push import verify as verify_copy
from launcher.image.image_locations import image_store
from launcher.job.settings import read_settings
from launcher.model.sizes import counted
from launcher.naming import first_of
from launcher.node.connect import Fleet, connect
from launcher.node.engine import Engine
from launcher.node.parallel import run_all, run_all_catching

data = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Copy data to nodes; list, verify and remove copies.",
)

Nodes = Annotated[
    str,
    typer.Option("--nodes", metavar="A,B", autocompletion=completion.hosts, help="Nodes, by their ssh aliases."),
]
Image = Annotated[
    str | None, typer.Option("--image", help="Image on the nodes that has Python, to read the data with.")
]
Which = Annotated[
    str,
    typer.Argument(
        metavar="DATA", help="Its file or folder, its name in a job, its source, or the hash that `data ls` shows."
    ),
]


@data.command(cls=Command, name="push", short_help="Copy data to every node.")
def push_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="File or folder, local or on a node, HOST:/PATH; or a URL.")
    ],
    nodes: Nodes,
    image: Annotated[str, typer.Option("--image", help="Image on the nodes that has Python, to copy the data with.")],
    rehash: Annotated[
        bool, typer.Option("--rehash", help="Read the whole source again, also what has not changed by its times.")
    ] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env", metavar="NAME", help="A variable of yours for the download of a URL: credentials, endpoint."
        ),
    ] = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Copy data to every node. The source sends one copy, which the nodes pass on;
    only missing pieces are sent. The `data` key of a job does the same. A URL is
    downloaded by one of the nodes.

    If a node fails, the other nodes still receive the data. Run the command
    again to resume.

    Example: launcher data push gpu-a:/data/pets --nodes gpu-a,gpu-b --image X
    """
    parsed = parse_source(source, Path.cwd())
    if env and not parsed.url:
        raise UsageError("--env", "is for the download of a URL", "remove it")
    if rehash and parsed.url:
        raise UsageError(
            "--rehash", "has no effect: copies of a URL are compared with it by ETag or digest", "remove it"
        )
    if missing := [name for name in env or () if not os.environ.get(name)]:
        known = "set in your environment, but empty" if missing[0] in os.environ else "not set in your environment"
        raise UsageError("--env", f"{missing[0]} is {known}", f"run: export {missing[0]}=VALUE")
    variables = Variables(secrets={name: os.environ[name] for name in env or ()})
    with _connected(nodes, ssh_config) as fleet, LongWork() as work:
        found = run_all([partial(_node, engine, image) for engine in fleet.engines])
        done = distribute(parsed, found, fleet.ssh_config, work.log, work.progress, rehash=rehash, variables=variables)
    if json:
        sizes = {"sent": done.delivered.sent, "received": done.delivered.received}
        if parsed.url:
            sizes["downloaded"] = vars(done.downloaded)
        terminal.say_json({"content": done.delivered.content, **sizes, "paths": dict(done.paths)})
        return
    for line in _pushed(done):
        terminal.say(line)


def _pushed(done: Distributed) -> Iterator[str]:
    if done.downloaded.by:
        yield done.said()
    for node, path in done.paths.items():
        received = done.delivered.received.get(node)
        how = "complete, nothing had to be sent" if received == 0 else "used in place"
        yield f"{node}: {path}  {f'{decimal(received)} received' if received else how}"


@data.command(cls=Command, name="ls", short_help="List the data on each node.")
def list_(nodes: Nodes, json: options.Json = False, ssh_config: options.SshConfig = None) -> None:
    """List the data on each node: size, last use, whole or partial. A node that has
    the source itself uses it in place. Downloads of this machine are listed too.

    Example: launcher data ls --nodes gpu-a,gpu-b
    """
    with _connected(nodes, ssh_config, allow_failures=True) as fleet:
        found = {**_copies(fleet), **_downloads()}
        if json:
            every = [{**vars(copy), "whole": copy.whole} for each in found.values() for copy in each]
            terminal.say_json(every)
        else:
            terminal.table_console().print(_table(found))
        if fleet.failed:
            raise NodesFailed(list(fleet.failed.values()), of=len(fleet.failed) + len(fleet.engines))


@data.command(cls=Command, name="verify", short_help="Read every byte of the copies.")
def verify_(which: Which, nodes: Nodes, image: Image = None, ssh_config: options.SshConfig = None) -> None:
    """Read every byte of the copies and compare their checksums.

    Exit code 3 if files differ; they are listed, and `data push` repairs them.

    Example: launcher data verify pets --nodes gpu-a,gpu-b
    """
    with _connected(nodes, ssh_config) as fleet:
        chosen = select(_copies(fleet), source_named(which, Path.cwd()))
        engines = {engine.node: engine for engine in fleet.engines}
        whole = [copy for copy in chosen if copy.whole]
        outcomes = run_all_catching([partial(_verify, engines[copy.node], copy, image) for copy in whole])
    checked = list(zip(whole, outcomes, strict=True))
    for copy, outcome in checked:
        if not outcome:
            terminal.say(f"{copy.node}: {copy.name[:12]} is whole: {counted(copy.files, 'file')}, {decimal(copy.size)}")
    incomplete = [copy for copy in chosen if not copy.whole]
    for copy in incomplete:
        Reporter().warn(f"{copy.node}: {copy.name[:12]} is partial")
    damaged = [copy for copy, outcome in checked if outcome and not isinstance(outcome, LauncherError)]
    repair = _push_of([*damaged, *incomplete], image, ssh_config)
    if repair and not damaged:
        Reporter().warn(f"to complete it, run: {repair}")
    if failed := _failures(checked, repair):
        raise NodesFailed(failed, of=len(outcomes))


def _failures(checked: Sequence[tuple[Copy, Sequence[str] | LauncherError]], repair: str) -> list[LauncherError]:
    """Return what is wrong with each copy. The last one that differs has the command that repairs all."""
    failed: list[LauncherError] = []
    for copy, outcome in reversed(checked):
        if isinstance(outcome, LauncherError):
            failed.append(outcome)
        elif outcome:
            what = f"{copy.name[:12]} ({copy.source}) differs in {first_of(outcome, 10)}"
            failed.append(DataFailed(copy.node, what, repair and f"to transfer what is missing, run: {repair}"))
            repair = ""
    return failed[::-1]


def _push_of(found: Sequence[Copy], image: str | None, ssh_config: Path | None) -> str:
    """Return the commands that complete these copies, as they can be typed; "" for none."""
    commands = []
    for source in dict.fromkeys(copy.source for copy in found):
        of_it = [copy for copy in found if copy.source == source]
        here = source.removeprefix(f"{os.uname().nodename}:")
        with_image = next(filter(None, (image, *(copy.image for copy in of_it))), "IMAGE")
        words = ["launcher", "data", "push", here, "--nodes", ",".join(copy.node for copy in of_it)]
        words += ["--image", with_image, *(("--ssh-config", str(ssh_config)) if ssh_config else ())]
        commands.append(shlex.join(words))
    return " && ".join(commands)


@data.command(cls=Command, short_help="Remove your copies from nodes.")
def rm(which: Which, nodes: Nodes, ssh_config: options.SshConfig = None) -> None:
    """Remove your copies, whole or partial, from these nodes, and what this machine
    downloaded of the data, unless a container has them mounted.

    Example: launcher data rm pets --nodes gpu-b
    """
    settings = read_settings(os.environ)
    with _connected(nodes, ssh_config) as fleet:
        chosen = select({**_copies(fleet), **_downloads()}, source_named(which, Path.cwd()))
        engines = {engine.node: engine for engine in fleet.engines}

        def remove_(copy: Copy) -> None:
            if copy.node == HERE:
                remove(*here(), copy)
            else:
                engine = engines[copy.node]
                remove(engine, root_of(engine, settings, copies=False), copy)
            terminal.say(f"{copy.node}: removed {copy.name[:12]}")

        run_all([partial(remove_, copy) for copy in chosen])


def _connected(nodes: str, ssh_config: Path | None, *, allow_failures: bool = False) -> Fleet:
    hosts = options.hosts(nodes) or []
    if not hosts:
        raise UsageError("--nodes", "no node is given", "for example: --nodes gpu-a,gpu-b")
    return connect([(host, host) for host in hosts], "docker", ssh_config, allow_failures=allow_failures)


def _node(engine: Engine, image: str) -> DataNode:
    found = image_store(engine).inspect(image)
    if found is None:
        raise DataFailed(
            engine.node, f"has no image {image}", "use an image that the node has, or run: launcher image ship JOB"
        )
    return DataNode(engine, engine.facts(), found.id)


def _copies(fleet: Fleet) -> Mapping[str, Sequence[Copy]]:
    settings = read_settings(os.environ)

    def list_copies(engine: Engine) -> Sequence[Copy]:
        return copies(engine, root_of(engine, settings, copies=False, make=False))

    return dict(zip([engine.node for engine in fleet.engines], fleet.each(list_copies), strict=True))


def _downloads() -> Mapping[str, Sequence[Copy]]:
    found = copies(*here())
    return {HERE: found} if found else {}


def _verify(engine: Engine, copy: Copy, image: str | None) -> Sequence[str]:
    """Return what differs."""
    root = root_of(engine, read_settings(os.environ), copies=False)
    node = with_image_of_copy(DataNode(engine, engine.facts(), image or ""), root, copy.name)
    return verify_copy(node.endpoint(root), copy.name)


def _table(found: Mapping[str, Sequence[Copy]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("node", "data", "source", "size", "files", "last use", "state"):
        table.add_column(column, overflow="fold")
    for node, each in found.items():
        for copy in each:
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(copy.used))
            state = "whole" if copy.whole else f"partial, {decimal(copy.present)} present"
            cells = (node, copy.name[:12], copy.source, decimal(copy.size), f"{copy.files:,}", used, state)
            table.add_row(*map(escape, cells))
        for copy in _from(node, found):
            cells = (node, copy.name[:12], copy.source, decimal(copy.size), f"{copy.files:,}", "", "the source")
            table.add_row(*map(escape, cells))
    return table


def _from(node: str, found: Mapping[str, Sequence[Copy]]) -> list[Copy]:
    """Return a whole copy of each data set whose source is on this node."""
    every = [copy for each in found.values() for copy in each if copy.whole]
    return [*{copy.name: copy for copy in every if copy.source.startswith(f"{node}:")}.values()]
