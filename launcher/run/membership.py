"""Whether the ranks of a run trained together: which of them joined a process group, as flight_recorder.py notes it.

A program that never joins one trains as often as it has ranks. Nothing is known with torch before 2.5 and of commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.local_files import read_end
from launcher.node.ends import GROUPS as LIMIT
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record
from launcher.run.watch import attempts

TOGETHER = (
    "if they are to train together: torch.distributed.init_process_group() and DistributedDataParallel in the program"
)
_LINE = re.compile(
    r"^(?:watched (?P<watched>\d{1,6})|(?P<what>group|inner) (?P<rank>\d{1,6}) (?P<size>\d{1,7})) (?P<time>\d{1,12})$",
    re.MULTILINE | re.ASCII,
)

_EVENTS = re.compile(r"events\.out\.tfevents\.(?P<time>\d{1,12})\.(?P<process>.+\.\d+)\.\d+", re.ASCII)  # of torch


@dataclass(frozen=True)
class Joined:
    """Of a node's last attempt. watched: the ranks of which it is known. sizes: of the groups that ranks joined.

    inner: a process that a rank had started joined one.
    """

    watched: frozenset[int]
    sizes: Mapping[int, int]
    inner: bool


def parse(text: bytes, since: float = 0.0) -> Joined:
    """Parse a node's file; other lines are ignored. since: when its last attempt started, by the node's clock."""
    found = [*_LINE.finditer(text.decode("utf-8", "replace"))]
    now = [each for each in found if int(each["time"]) >= int(since)]
    return Joined(
        frozenset(int(each["watched"]) for each in now if each["watched"]),
        {int(each["rank"]): int(each["size"]) for each in now if each["what"] == "group"},
        any(each["what"] == "inner" for each in now),
    )


def together(nodes: Sequence[NodeOfRun], seen: Mapping[str, Joined], least: int = 0) -> bool:
    """Whether ranks of all nodes (of at least `least`, if not 0) are in a group larger than their node.

    seen: by node name.
    """
    size = {node.name: len(node.ranks) for node in nodes}
    joined = [name for name, one in seen.items() if any(each > size[name] for each in one.sizes.values())]
    return len(joined) >= (least or len(nodes))


def so_far(record: Record) -> str:
    """Return that the ranks of a run do not train together, "" while only one process has written curves.

    By then, a program has joined its process group. From the collected files.
    """
    nodes = record.nodes()
    seen = collected(record.paths.root, nodes)
    if record.is_command or record.min_nodes or not apart(nodes, seen):
        return ""
    since = min(attempts.started(record.paths.root, node) for node in nodes)
    writers = curve_writers((path.name for path in record.paths.tensorboard.rglob("*")), since)
    if writers < 2:
        return ""
    size = sum(len(node.ranks) for node in nodes)
    return f"{writers} ranks write curves, but no process group has all {size} ranks; {TOGETHER}"


def curve_writers(names: Iterable[str], since: float) -> int:
    """Return how many processes have begun a file of events of TensorBoard since then. names: of files."""
    found = [match for name in names if (match := _EVENTS.match(name))]
    return len({match["process"] for match in found if int(match["time"]) >= int(since)})


def apart(nodes: Iterable[NodeOfRun], seen: Mapping[str, Joined]) -> str:
    """Return that the ranks of a run that has ended did not train together; "" if they did, or if it is not known."""
    ranks = {rank for node in nodes for rank in node.ranks}
    watched = {rank for one in seen.values() for rank in one.watched}
    if len(ranks) < 2 or not ranks <= watched or any(one.inner for one in seen.values()):
        return ""
    largest = max((size for one in seen.values() for size in one.sizes.values()), default=0)
    if largest >= len(ranks):
        return ""
    if largest:
        return f"no process group had all {len(ranks)} ranks, the largest had {largest}: they trained separately"
    return f"no rank joined a process group: each of the {len(ranks)} ranks worked alone"


def collected(root: Path, nodes: Sequence[NodeOfRun]) -> dict[str, Joined]:
    """Return what is known of each node's last attempt, from the collected files."""
    return {node.name: _of_node(root, node) for node in nodes}


def _of_node(root: Path, node: NodeOfRun) -> Joined:
    return parse(read_end(NodePaths(str(root), node.name).groups, LIMIT), attempts.started(root, node))
