"""What a node's file of attempts says: how often its processes were started, how each attempt ended, in which
generations of a job with min_nodes it took part, because of whom these ended, and who stopped it. The entry script and
elastic.py write it, and who stops a run adds a line: launchers that are attached to it follow this file.

The engine's own counter forgets when the node reboots; this file does not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record
from launcher.run.state import HANG_CODE, SIGKILL_CODE, SIGTERM_CODE, TIMEOUT_CODE

_ATTEMPT = re.compile(r"^(start|left|exit \d{1,15}|halted \d{1,15}) (\d{1,15})$", re.MULTILINE)
_STOPPED = re.compile(rb"^stopped ([!-~]{1,400}) \d+$", re.MULTILINE)  # as locate.caller() writes it
_START = re.compile(rb"^start ", re.MULTILINE)  # at the start of a line: a node may be called kickstart
_GENERATION = re.compile(
    r"^generation (?P<number>\d{1,9}) (?P<offset>\d{1,15}) (?P<members>[!-~]{1,99999}) (?P<text>rank 0 [ -~]{1,9999})$",
    re.MULTILINE,
)
_ENDED = re.compile(r"^ended (?P<number>\d{1,9}) (?P<nodes>[!-~]{1,99999}) [ -~]{1,9999}$", re.MULTILINE)
_OVER = re.compile(r"^over (?P<why>[ -~]{1,9999})$", re.MULTILINE)
ANNOUNCE = '[ ! -f "$1" ] || echo "$2" >>"$1"'  # adds a stop_line() to the file of a run that has begun
LIMIT = 1 << 20  # bytes of the file that are read
_MEANINGS = {SIGKILL_CODE: "SIGKILL", SIGTERM_CODE: "SIGTERM", TIMEOUT_CODE: "time limit", HANG_CODE: "hung"}


@dataclass(frozen=True)
class Attempt:
    """One start of a node's processes. Seconds since the epoch by the node's clock.

    ended and code are None while it runs, and where its container was killed or its node went down.
    """

    started: float
    ended: float | None = None
    code: int | None = None
    halted: frozenset[int] = frozenset()  # ranks that were suspended when the others were ended
    left: bool = False  # when it was stopped, all of its ranks had ended, and its torchrun waited for the other nodes

    def why(self) -> str:
        """Why it had to be followed by another one."""
        if self.ended is None:
            return "being killed with its container, its engine or its node"
        meaning = f" ({_MEANINGS[self.code]})" if self.code in _MEANINGS else ""
        return f"exit code {self.code}{meaning} after {self.ended - self.started:.0f} s"


@dataclass(frozen=True)
class World:
    """A generation: the nodes that take part in it, until one of them is lost."""

    number: int
    offset: int  # bytes that the node's log had before it
    members: tuple[str, ...]  # by node rank: the first has rank 0
    text: str  # for a person: `rank 0 is now on gpu-c, world 3 of 4: gpu-a lost at 12:03 UTC`


@dataclass(frozen=True)
class Ended:
    """The last generation that has ended on a node, and because of which ones, as that node has seen it."""

    number: int
    nodes: tuple[str, ...]  # () where that is not known


@dataclass(frozen=True)
class Segment:
    """The part of a node's log that was printed while rank 0 was there: from `start` to `stop` (None: its end)."""

    world: World
    node: NodeOfRun
    start: int
    stop: int | None


def parse(text: bytes) -> tuple[Attempt, ...]:
    """Other lines and torn ones are ignored."""
    found: list[Attempt] = []
    for what, moment in _ATTEMPT.findall(text.decode("utf-8", "replace")):
        word, _, number = what.partition(" ")
        if word == "start":
            found.append(Attempt(int(moment)))
        elif found and word == "exit" and found[-1].ended is None:
            found[-1] = replace(found[-1], ended=int(moment), code=int(number))
        elif found and word == "halted":
            found[-1] = replace(found[-1], halted=found[-1].halted | {int(number)})
        elif found and word == "left":
            found[-1] = replace(found[-1], left=True)
    return tuple(found)


def reasons(attempts: Sequence[Attempt]) -> list[str]:
    """Why each restart was needed, in order."""
    return [attempt.why() for attempt in attempts[:-1]]


def stop_line(by: str) -> str:
    """What is added to the file before a running container is stopped. by: user@host."""
    return f"stopped {by} {int(time.time())}"


def stopped_by(text: bytes) -> str | None:
    """Who stopped the last attempt; None where it was not stopped."""
    found = _STOPPED.search(_of_last_attempt(text))
    return found.group(1).decode() if found else None


def parse_worlds(text: bytes) -> tuple[World, ...]:
    """In their order; other lines are ignored."""
    found = _GENERATION.finditer(text.decode("utf-8", "replace"))
    return tuple(World(int(m["number"]), int(m["offset"]), tuple(m["members"].split(",")), m["text"]) for m in found)


def joined(text: bytes) -> int:
    """The generation in which the node's last attempt takes part; 0 where it has not begun one."""
    worlds = parse_worlds(_of_last_attempt(text))
    return worlds[-1].number if worlds else 0


def parse_ended(text: bytes) -> Ended | None:
    """None where no generation has ended on the node."""
    found = [*_ENDED.finditer(text.decode("utf-8", "replace"))]
    nodes = found[-1]["nodes"] if found else ""
    return Ended(int(found[-1]["number"]), () if nodes == "-" else tuple(nodes.split(","))) if found else None


def over(text: bytes) -> str:
    """Why the nodes of a job with min_nodes do not start its program again; "" where they do."""
    found = _OVER.search(text.decode("utf-8", "replace"))
    return found["why"] if found else ""


def _of_last_attempt(text: bytes) -> bytes:
    return text[max((found.start() for found in _START.finditer(text)), default=0) :]


def newest(worlds: Mapping[str, tuple[World, ...]]) -> World | None:
    """worlds: of each node."""
    return max((own[-1] for own in worlds.values() if own), key=lambda world: world.number, default=None)


def collected(root: Path, nodes: Iterable[NodeOfRun]) -> dict[str, tuple[World, ...]]:
    """Of each node, as far as its file has been brought to a run's folder here."""
    files = {node.name: Path(NodePaths(str(root), node.name).attempts) for node in nodes}
    return {name: parse_worlds(file.read_bytes()) for name, file in files.items() if file.is_file()}


def segments(record: Record) -> list[Segment]:
    """Rank 0's output, from one node's log to another's; the first with what its node printed before."""
    nodes = {node.name: node for node in record.nodes()}
    found = [
        Segment(world, nodes[name], world.offset, own[place + 1].offset if place + 1 < len(own) else None)
        for name, own in collected(record.paths.root, nodes.values()).items()
        for place, world in enumerate(own)
        if world.members[0] == name
    ]
    found.sort(key=lambda segment: segment.world.number)
    return [replace(segment, start=0) if segment is found[0] else segment for segment in found]
