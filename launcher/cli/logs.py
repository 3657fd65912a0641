"""`launcher logs`: the output of the master, of any node or rank, from any point, until the run ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Annotated

import typer

from launcher.cli import options
from launcher.cli.console import Screen
from launcher.cli.foreground import raise_silent, show_until_end
from launcher.cli.reporter import Reporter
from launcher.errors import UsageError
from launcher.job.scalars import parse_duration
from launcher.job.settings import read_settings
from launcher.logs.clock import Clock
from launcher.logs.position import last_lines, read_from
from launcher.node.files import Files
from launcher.node.parallel import run_all
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun
from launcher.run.followed import Followed
from launcher.run.locate import Attached, attach
from launcher.run.messages import Output

CLOCK_PIECES = 256  # of a megabyte: five months; a hostile node's has no end


def logs(
    run: options.Run = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f/-F", help="Go on until the run ends.")] = True,
    rank: Annotated[int | None, typer.Option(help="One worker's own output, by global rank.")] = None,
    node: Annotated[str | None, typer.Option(help="One node's output.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every node's, each line with its node.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Begin with the last N lines.")] = None,
    since: Annotated[str | None, typer.Option(metavar="T", help="Begin there: 10m (ago) or 2026-01-31T12:00.")] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", "-t", help="When each line was written.")] = False,
    raw: options.Raw = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Every line once, however often the connection breaks. Ctrl-C leaves the run going.

    Exit code, when it followed to the end: that of the run.
    """
    with attach(run, options.hosts(nodes, on), ssh_config, Reporter().log) as attached:
        attached.require_any()
        if unmasked := attached.record.unmasked:
            Reporter().warn(unmasked)
        chosen = _chosen(attached, rank, node, all_=all_)
        shown = run_all([partial(_beginning, attached, each, rank, tail, since) for each in chosen])
        with Screen(attached.record.mask, prefix=len(shown) > 1, raw=raw) as screen:
            if follow and not timestamps and attached.states:
                sys.exit(_follow(attached, shown, screen))
            for followed in shown:
                _print(attached, followed, screen, timestamps=timestamps)


def _chosen(attached: Attached, rank: int | None, node: str | None, *, all_: bool) -> Sequence[NodeOfRun]:
    if rank is not None:
        found = [each for each in attached.nodes if rank in each.ranks]
        if not found:
            last = max((each.ranks.stop for each in attached.nodes), default=0) - 1
            raise UsageError("--rank", f"{rank}: the run has ranks 0 to {last}", "`launcher status` lists them")
        return found
    if node is not None:
        return [attached.node(node)]
    return attached.nodes if all_ else attached.nodes[:1]


def _beginning(attached: Attached, node: NodeOfRun, rank: int | None, tail: int | None, since: str | None) -> Followed:
    paths = NodePaths(node.output, node.name)
    path = paths.log if rank is None else paths.rank_log(rank)
    files = attached.engines[node.name].files
    if tail is not None:
        return Followed(node, path, last_lines(files, path, tail))
    if since is not None and rank is None:
        return Followed(node, path, _clock(files, paths).offset_at(_moment(since)))
    return Followed(node, path, 0)


def _moment(text: str) -> float:
    """Seconds since the epoch of `10m` (ago) or of an ISO 8601 time."""
    with suppress(ValueError):
        return time.time() - parse_duration(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise UsageError("--since", f"{text} is neither a time nor a duration", "10m, 2h, 2026-01-31T12:00") from error


def _clock(files: Files, paths: NodePaths) -> Clock:
    return Clock.parse(b"".join(islice(read_from(files, paths.clock), CLOCK_PIECES)))


def _follow(attached: Attached, shown: Sequence[Followed], screen: Screen) -> int:
    attached.require_all()
    record = attached.record
    result = record.result()
    if result is not None:  # it has ended before: its output and its exit code
        for followed in shown:
            _print(attached, followed, screen, timestamps=False)
        return int(result.get("exit_code", 0))
    notify = read_settings(os.environ).notify
    try:
        outcome = show_until_end(attached, shown, screen, notify, resumed=True)
    except KeyboardInterrupt:
        screen.log(f"left {record.run} as it is; its state: launcher status {record.run}")
        raise_silent(screen, record.run)
        return 0
    return outcome.state.exit_code


def _print(attached: Attached, shown: Followed, screen: Screen, *, timestamps: bool) -> None:
    """What the file has now."""
    files = attached.engines[shown.node.name].files
    pieces = read_from(files, shown.path, shown.offset)
    if not timestamps:
        for piece in pieces:
            screen.show(Output(shown.node.name, piece))
        return
    clock, offset = _clock(files, NodePaths(shown.node.output, shown.node.name)), shown.offset
    for line in b"".join(pieces).splitlines(keepends=True):
        offset += len(line)
        at = clock.time_of(offset)
        stamp = datetime.fromtimestamp(at).astimezone().isoformat() if at is not None else "now"
        screen.show(Output(shown.node.name, f"{stamp} ".encode() + line))
