"""`launcher logs`: the output of the master, of any node or rank, from any point, until the run ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import options
from launcher.cli.console import Screen
from launcher.cli.foreground import raise_silent, show_until_end
from launcher.cli.terminal import Reporter
from launcher.errors import UsageError
from launcher.job.scalars import parse_duration
from launcher.logs.position import Clock, last_lines, read_from
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.node.parallel import run_all
from launcher.records.collect import collect, output_folders
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun
from launcher.run.attempts import Segment, segments
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
        earlier: Sequence[Segment] = ()
        if attached.record.min_nodes and node is None and not all_:
            earlier, now = _where_ranks_are(attached, rank, tail, since)
            shown = [now]
        else:
            chosen = _chosen(attached, rank, node, all_=all_)
            shown = run_all([partial(_beginning, attached, each, rank, tail, since) for each in chosen])
        with Screen(attached.record.mask, prefix=len(shown) > 1, raw=raw) as screen:
            here, root = Files(LocalMachine("this machine", "")), str(attached.record.paths.root.absolute())
            for part in earlier:
                log = Followed(part.node, NodePaths(root, part.node.name).log, part.start)
                _print(here, root, log, screen, part.stop, timestamps=timestamps)
            follow = follow and not timestamps and bool(attached.states)
            if follow and len(attached.unreachable) > attached.may_lose:
                attached.require_all()
            result = attached.record.result()
            if follow and result is None:
                sys.exit(_follow(attached, shown, screen))
            for each in shown:
                _print(attached.engines[each.node.name].files, each.node.output, each, screen, timestamps=timestamps)
            if follow and result is not None:  # it has ended before
                sys.exit(int(result.get("exit_code", 0)))


def _where_ranks_are(
    attached: Attached, rank: int | None, tail: int | None, since: str | None
) -> tuple[Sequence[Segment], Followed]:
    """In a job with min_nodes, where ranks move: where rank 0's output was, to be read here, and what to follow."""
    record = attached.record
    collect(output_folders(attached.engines, attached.nodes), record.paths.root, mask=record.mask)
    found = segments(record)
    world = found[-1].world if found else None
    if rank is not None and world is not None:
        workers = max(1, len(attached.nodes[0].ranks))
        place, last = rank // workers, len(world.members) * workers - 1
        if rank > last:
            raise UsageError("--rank", f"{rank}: the run has ranks 0 to {last} now", "`launcher status` lists them")
        node = attached.node(world.members[place])
        files = attached.engines[node.name].files
        path = f"{NodePaths(node.output, node.name).in_generation(world.number, place)}/rank-{rank}.log"
        return (), Followed(node, path, last_lines(files, path, tail) if tail is not None else 0)
    master = next((node for node in attached.nodes if world and node.name == world.members[0]), None)
    if master is None:  # it does not answer, or the run has not begun
        node = attached.nodes[0]
        log = Path(NodePaths(str(record.paths.root), node.name).log)
        size = log.stat().st_size if found and log.exists() else 0
        return found, Followed(node, NodePaths(node.output, node.name).log, size, moves=True, world=world)
    begin = _beginning(attached, master, None, tail, since)
    earlier = found[:-1] if tail is None and since is None else []
    return earlier, replace(begin, offset=max(begin.offset, found[-1].start), moves=True, world=world)


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
    try:
        return show_until_end(attached, shown, screen, resumed=True).state.exit_code
    except KeyboardInterrupt:
        run = attached.record.run
        screen.log(f"left {run} as it is; its state: launcher status {run}")
        raise_silent(screen, run)
        return 0


def _print(
    files: Files, output: str, shown: Followed, screen: Screen, stop: int | None = None, *, timestamps: bool
) -> None:
    """What the file has now, as far as `stop`. output: the folder that it is in."""
    node, offset = shown.node.name, shown.offset
    pieces = read_from(files, shown.path, offset, stop)
    if not timestamps:
        for piece in pieces:
            screen.show(Output(node, piece))
        return
    clock = _clock(files, NodePaths(output, node))
    for line in b"".join(pieces).splitlines(keepends=True):
        offset += len(line)
        at = clock.time_of(offset)
        stamp = datetime.fromtimestamp(at).astimezone().isoformat() if at is not None else "now"
        screen.show(Output(node, f"{stamp} ".encode() + line))
