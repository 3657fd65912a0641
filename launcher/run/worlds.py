"""Which nodes a job with min_nodes has run on, from lines that elastic.py adds to each member's file of attempts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record

_LINE = re.compile(
    r"^generation (?P<number>\d{1,9}) (?P<offset>\d{1,15}) (?P<members>[!-~]{1,99999}) (?P<text>rank 0 [ -~]{1,9999})$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class World:
    """A generation: the nodes that take part in it, until one of them is lost."""

    number: int
    offset: int  # bytes that the node's log had before it
    members: tuple[str, ...]  # by node rank: the first has rank 0
    text: str  # for a person: `rank 0 is now on gpu-c, world 3 of 4: gpu-a lost at 12:03 UTC`


@dataclass(frozen=True)
class Segment:
    """The part of a node's log that was printed while rank 0 was there: from `start` to `stop` (None: its end)."""

    world: World
    node: NodeOfRun
    start: int
    stop: int | None


def parse(attempts: bytes) -> tuple[World, ...]:
    """In their order; other lines are ignored."""
    found = _LINE.finditer(attempts.decode("utf-8", "replace"))
    return tuple(World(int(m["number"]), int(m["offset"]), tuple(m["members"].split(",")), m["text"]) for m in found)


def newest(worlds: Mapping[str, tuple[World, ...]]) -> World | None:
    """worlds: of each node."""
    return max((own[-1] for own in worlds.values() if own), key=lambda world: world.number, default=None)


def collected(root: Path, nodes: Iterable[NodeOfRun]) -> dict[str, tuple[World, ...]]:
    """Of each node, as far as its file has been brought to a run's folder here."""
    files = {node.name: Path(NodePaths(str(root), node.name).attempts) for node in nodes}
    return {name: parse(file.read_bytes()) for name, file in files.items() if file.is_file()}


def segments(record: Record) -> list[Segment]:
    """Rank 0's output, from one node's log to another's; the first with what its node printed before."""
    nodes = {node.name: node for node in record.nodes()}
    worlds = collected(record.paths.root, nodes.values())
    found = [
        Segment(world, nodes[name], world.offset, own[place + 1].offset if place + 1 < len(own) else None)
        for name, own in worlds.items()
        for place, world in enumerate(own)
        if world.members[0] == name
    ]
    found.sort(key=lambda segment: segment.world.number)
    return [replace(segment, start=0) if segment is found[0] else segment for segment in found]
