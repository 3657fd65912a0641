"""`launcher logs`: the output of the master, of any node or rank, from any point, until the run ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import options
from launcher.cli.console import Screen
from launcher.errors import LauncherError, NodesFailed, UsageError
from launcher.job.files import read_secrets
from launcher.job.loader import load_job
from launcher.job.scalars import parse_duration
from launcher.logs.clock import Clock
from launcher.logs.follow import Tail, last_lines
from launcher.logs.lines import Masker
from launcher.node.engine import Files
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record
from launcher.run.locate import Attached, attach
from launcher.run.notice import Notice, give, read_settings, settings_file
from launcher.run.supervise import Supervisor
from launcher.run.watch import Output, Source, Watch


def logs(
    run: options.Run = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f/-F", help="Go on until the run ends.")] = True,
    rank: Annotated[
        int | None, typer.Option(help="One worker's own output, by global rank.", show_default=False)
    ] = None,
    node: Annotated[str | None, typer.Option(help="One node's output.", show_default=False)] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every node's, each line with its node.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Begin with the last N lines.", show_default=False)] = None,
    since: Annotated[
        str | None, typer.Option(metavar="T", help="Begin there: 10m (ago) or 2026-01-31T12:00.", show_default=False)
    ] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", "-t", help="When each line was written.")] = False,
    nodes: options.Nodes = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Every line once, however often the connection breaks. Ctrl-C leaves the run going.

    Exit code, when it followed to the end: that of the run.
    """
    with attach(run, options.hosts(nodes), ssh_config) as attached:
        if not attached.nodes:
            raise NodesFailed(list(attached.unreachable.values()))
        masker = Masker(known_secrets(attached.record))
        chosen = _chosen(attached, rank, node, all_=all_)
        sources = [_source(attached, each, rank, tail, since) for each in chosen]
        if timestamps:
            follow = False
        with Screen(masker, prefix=len(sources) > 1) as screen:
            if follow and attached.states:
                sys.exit(_follow(attached, sources, screen))
            for source in sources:
                _print(attached, source, screen, timestamps=timestamps)


def _chosen(attached: Attached, rank: int | None, node: str | None, *, all_: bool) -> Sequence[NodeOfRun]:
    if rank is not None:
        found = [each for each in attached.nodes if rank in each.ranks]
        if not found:
            last = max((each.ranks.stop for each in attached.nodes), default=0) - 1
            raise UsageError("--rank", f"{rank}: the run has ranks 0 to {last}", "`launcher status` lists them")
        return found
    if node is not None:
        found = [each for each in attached.nodes if node in (each.name, each.host)]
        if not found:
            names = ", ".join(each.name for each in attached.nodes)
            raise UsageError("--node", f"{node}: the run's nodes are {names}", "")
        return found
    return attached.nodes if all_ else attached.nodes[:1]


def _source(attached: Attached, node: NodeOfRun, rank: int | None, tail: int | None, since: str | None) -> Source:
    paths = NodePaths(node.output, node.name)
    path = paths.log if rank is None else paths.rank_log(rank)
    files = attached.engines[node.name].files
    if tail is not None:
        return Source(node, path, last_lines(files, path, tail))
    if since is not None and rank is None:
        return Source(node, path, _clock(files, paths).offset_at(_moment(since)))
    return Source(node, path, 0)


def _moment(text: str) -> float:
    """Seconds since the epoch of `10m` (ago) or of an ISO 8601 time."""
    try:
        return time.time() - parse_duration(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise UsageError("--since", f"{text} is neither a time nor a duration", "10m, 2h, 2026-01-31T12:00") from error


def _clock(files: Files, paths: NodePaths) -> Clock:
    return Clock.parse(b"".join(Tail(files, paths.clock).drain()))


def _follow(attached: Attached, sources: Sequence[Source], screen: Screen) -> int:
    attached.require_all()
    watch = Watch(attached.engines, attached.nodes, sources, attached.record.paths)
    if attached.record.result() is not None:
        return _replay(attached, watch, screen)
    notify = read_settings(settings_file(os.environ)).notify
    try:
        with screen.live():
            outcome = Supervisor(attached.engines, attached.record, attached.nodes, watch, screen.show).attend()
    except KeyboardInterrupt:
        screen.say(f"left {attached.record.run} as it is; its state: launcher status {attached.record.run}")
        return 0
    screen.conclude(outcome)
    for problem in give(notify, Notice.of(outcome)):
        screen.say(f"warning: no notice was given: {problem}")
    return outcome.state.exit_code


def _replay(attached: Attached, watch: Watch, screen: Screen) -> int:
    """A run that has ended before: its output, its exit code, nothing concluded anew."""
    for message in watch.messages():
        if isinstance(message, Output):
            screen.show(message)
    result = attached.record.result() or {}
    return int(result.get("exit_code", 0))


def _print(attached: Attached, source: Source, screen: Screen, *, timestamps: bool) -> None:
    """What is there now."""
    files = attached.engines[source.node.name].files
    tail = Tail(files, source.path, source.offset)
    clock = _clock(files, NodePaths(source.node.output, source.node.name)) if timestamps else None
    if clock is None:
        for piece in tail.drain():
            screen.show(Output(source.node.name, piece))
        return
    offset = source.offset
    for line in b"".join(tail.drain()).splitlines(keepends=True):
        offset += len(line)
        at = clock.time_of(offset)
        stamp = datetime.fromtimestamp(at).astimezone().isoformat() if at is not None else "now"
        screen.show(Output(source.node.name, f"{stamp} ".encode() + line))


def known_secrets(record: Record) -> list[str]:
    """The values to mask, as far as this caller has them."""
    if not record.paths.job.exists():
        return []
    try:
        return list(read_secrets(load_job(record.paths.job), Path.cwd(), os.environ).values())
    except LauncherError:
        return []  # another shell, without the secrets: there is nothing to mask with
