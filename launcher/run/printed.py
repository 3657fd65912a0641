"""Output of a run: select nodes or ranks and a start position, and read the current content."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path

from launcher.errors import UsageError
from launcher.job.scalars import parse_duration
from launcher.logs.position import Clock, last_lines, read_from
from launcher.node.files import Files
from launcher.node.machine import LocalMachine
from launcher.node.parallel import run_all
from launcher.node.process.engine import ProcessEngine
from launcher.records.collect import collect, output_folders
from launcher.records.paths import NodePaths, as_shown
from launcher.records.store import NodeOfRun
from launcher.run.locate import Attached, Note
from launcher.run.selection import Selection
from launcher.run.watch.attempts import Generation, Segment, segments
from launcher.run.watch.messages import Output
from launcher.run.watch.observed import Shown

CLOCK_PIECES = 256  # of 1 MB: five months of output; protects against an endless file of a hostile node


@dataclass(frozen=True)
class Parts:
    """Location of the selected output. earlier: output of nodes that had rank 0 before, from the collected files."""

    now: Sequence[Shown]
    earlier: Sequence[Segment] = ()


def master_from_start(attached: Attached) -> Parts:
    """Return the parts for a run that was just started, without querying any node."""
    master = attached.nodes[0]
    return Parts([Shown(master, NodePaths(master.output, master.name).log, moves=attached.record.min_nodes > 0)])


def with_copies(attached: Attached, note: Note) -> Attached:
    """Return `attached` with the copies in runs/ in place of what its nodes no longer have: an output folder that was
    removed (`clean`), or any that is on an unreachable node once the run has ended.
    """
    record = attached.record
    asked = [node for node in attached.nodes if node.name not in attached.states]
    there = dict(zip(asked, run_all([partial(_has_output, attached, node) for node in asked]), strict=True))
    removed = [node for node in asked if not there[node]]
    silent = [node for node in record.nodes() if node.name in attached.unreachable and record.result() is not None]
    root = str(record.paths.root)
    copies = [node for node in (*removed, *silent) if Path(NodePaths(root, node.name).log).is_file()]
    for nodes, why in ((removed, "no longer has the output"), (silent, "does not respond")):
        if which := ", ".join(node.name for node in nodes if node in copies):
            note(f"{which} {why}: this is the copy in {as_shown(record.paths.root)}/")
    local = [replace(node, output=root) for node in copies]
    names = {node.name for node in copies}
    return replace(
        attached,
        nodes=tuple(sorted([*(n for n in attached.nodes if n.name not in names), *local], key=lambda node: node.rank)),
        engines={**attached.engines, **{node.name: ProcessEngine(node.name) for node in local}},
        unreachable={name: error for name, error in attached.unreachable.items() if name not in names},
    )


def _has_output(attached: Attached, node: NodeOfRun) -> bool:
    return b"@@there" in attached.engines[node.name].machine.script('[ ! -d "$1" ] || echo @@there', node.output).out


def find_output(attached: Attached, chosen: Selection) -> Parts:
    """Locate the selected output. Raises UsageError if the run has no such rank or node, or no output by rank,
    NodesFailed.
    """
    if chosen.rank is not None and attached.record.is_command:
        what = f"{chosen.rank}: run.command starts its own processes, so their output is known by node only"
        raise UsageError("--rank", what, f"to show that of a node: launcher logs {attached.record.run} --node NODE")
    if attached.record.min_nodes and chosen.node is None and not chosen.all_nodes:
        return _find_elastic(attached, chosen)
    nodes = _nodes(attached, chosen)
    return Parts(run_all([partial(_start, attached, node, chosen) for node in nodes]))


def read_earlier(attached: Attached, parts: Parts, *, timestamps: bool = False) -> Iterator[Output]:
    """Yield the output of the nodes that had rank 0 before."""
    here, root = Files(LocalMachine("this machine", "")), str(attached.record.paths.root)
    for part in parts.earlier:
        log = Shown(part.node, NodePaths(root, part.node.name).log, part.start)
        if Path(log.path).is_file():  # opening a FIFO would block
            yield from _read(here, root, log, part.stop, timestamps=timestamps)


def read_now(attached: Attached, parts: Parts, *, timestamps: bool = False) -> Iterator[Output]:
    """Yield the current content of the nodes' files. timestamps: prefix each line with its time, to the second."""
    for shown in parts.now:
        files, state = attached.engines[shown.node.name].files, attached.states.get(shown.node.name)
        ended = None if state is not None and not state.phase.ended else state.finished if state else 0.0
        yield from _read(files, shown.node.output, shown, timestamps=timestamps, ended=ended)


def _find_elastic(attached: Attached, chosen: Selection) -> Parts:
    """Locate output in a job with min_nodes, whose ranks move: earlier output of rank 0, and the file to follow."""
    record, rank, tail = attached.record, chosen.rank, chosen.tail
    found = _generations(attached)
    generation = found[-1].generation if found else None
    if rank is not None and generation is not None:
        node, node_rank = _rank_of(attached, generation, rank)
        files = attached.engines[node.name].files
        path = f"{NodePaths(node.output, node.name).in_generation(generation.number, node_rank)}/rank-{rank}.log"
        start = last_lines(files, path, tail, below=node.output) if tail is not None else 0
        return Parts([Shown(node, path, start)])
    master = next((node for node in attached.nodes if generation and node.name == generation.members[0]), None)
    if master is None:  # it is unreachable, or the run has not started
        node = attached.nodes[0]
        log = Path(NodePaths(str(record.paths.root), node.name).log)
        size = log.stat().st_size if found and log.exists() else 0
        shown = Shown(node, NodePaths(node.output, node.name).log, size, moves=True, generation=generation)
        return Parts([shown], found)
    now = _start(attached, master, replace(chosen, rank=None))
    earlier = found[:-1] if tail is None and chosen.since is None else []
    shown = replace(now, offset=max(now.offset, found[-1].start), moves=True, generation=generation)
    return Parts([shown], earlier)


def node_of_rank(attached: Attached, rank: int) -> NodeOfRun:
    """Return the node of this rank. Raises UsageError if the run has no such rank, NodesFailed."""
    if attached.record.min_nodes and (found := _generations(attached)):
        return _rank_of(attached, found[-1].generation, rank)[0]
    return _nodes(attached, Selection(rank=rank))[0]


def _generations(attached: Attached) -> Sequence[Segment]:
    """Return rank 0's output per generation of a job with min_nodes, after collecting from the reachable nodes."""
    record = attached.record
    folders = output_folders(attached.engines, attached.nodes)
    collect(folders, record.paths.root, mask=record.mask, code=record.sent_code)
    return segments(record)


def _to(last: int) -> str:
    return f"ranks 0 to {last}" if last else "only rank 0"


def _rank_of(attached: Attached, generation: Generation, rank: int) -> tuple[NodeOfRun, int]:
    """Return the node that has this rank in a generation, and its node rank. Raises UsageError."""
    workers = max(1, len(attached.nodes[0].ranks))
    node_rank, last = rank // workers, len(generation.members) * workers - 1
    if rank > last:
        raise UsageError("--rank", f"{rank}: the run has {_to(last)} now", "`launcher status` lists them")
    return attached.node(generation.members[node_rank]), node_rank


def _nodes(attached: Attached, chosen: Selection) -> Sequence[NodeOfRun]:
    if chosen.rank is not None:
        found = [each for each in attached.nodes if chosen.rank in each.ranks]
        if not found:
            attached.require_all()  # an unreachable node may have it
            last = max((each.ranks.stop for each in attached.nodes), default=0) - 1
            raise UsageError("--rank", f"{chosen.rank}: the run has {_to(last)}", "`launcher status` lists them")
        return found
    if chosen.node is not None:
        return [attached.node(chosen.node)]
    if not chosen.all_nodes and attached.nodes[0].rank:
        attached.require_all()  # the first node is unreachable
    return attached.nodes if chosen.all_nodes else attached.nodes[:1]


def _start(attached: Attached, node: NodeOfRun, chosen: Selection) -> Shown:
    paths = NodePaths(node.output, node.name)
    path = paths.log if chosen.rank is None else paths.rank_log(chosen.rank)
    files = attached.engines[node.name].files
    if chosen.tail is not None:
        return Shown(node, path, last_lines(files, path, chosen.tail, below=node.output))
    if chosen.since is not None and chosen.rank is None:
        return Shown(node, path, _clock(files, paths).offset_at(_moment(chosen.since)))
    return Shown(node, path, 0)


def _moment(text: str) -> float:
    """Convert `10m` (ago) or an ISO 8601 time to seconds since the epoch."""
    with suppress(ValueError):
        return time.time() - parse_duration(text)
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise UsageError(
            "--since", f"{text} is neither a time nor a duration", "examples: 10m, 2h, 2026-01-31T12:00"
        ) from error


def _clock(files: Files, paths: NodePaths) -> Clock:
    return Clock.parse(b"".join(islice(read_from(files, paths.clock, below=paths.output), CLOCK_PIECES)))


def _read(
    files: Files,
    output: str,
    shown: Shown,
    stop: int | None = None,
    *,
    timestamps: bool,
    ended: float | None = 0.0,
) -> Iterator[Output]:
    """Yield the current content of a file, up to `stop`. output: the node's output folder. ended: when its container
    did, in seconds since the epoch; 0: unknown, None: it runs.
    """
    node, offset = shown.node.name, shown.offset
    pieces = read_from(files, shown.path, offset, stop, below=output)
    if not timestamps:
        yield from (Output(node, piece) for piece in pieces)
        return
    clock = _clock(files, NodePaths(output, node))
    for line in b"".join(pieces).splitlines(keepends=True):
        offset += len(line)
        at = clock.time_of(offset)
        if at is None and ended is not None:  # within a second of the last note, if there is one
            at = clock.times[-1] if clock.times else ended
        stamp = "now" if at is None else datetime.fromtimestamp(at).astimezone().isoformat() if at else "unknown"
        yield Output(node, f"{stamp} ".encode() + line)
