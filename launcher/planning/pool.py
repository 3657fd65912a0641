"""Which machines of a pool the next variant of a sweep gets, and at which port its ranks meet."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import cycle, islice

from launcher.errors import NodeUnfit
from launcher.job.models import Job, NodeEntry
from launcher.job.scalars import LOCAL
from launcher.model.facts import NodeFacts
from launcher.planning.gpu_faults import fault
from launcher.planning.gpus import devices, has_none, select


@dataclass(frozen=True)
class Place:
    """Where a variant runs: names of machines, the master first."""

    nodes: tuple[str, ...]
    port: int


PORTS = 1000  # from the job's on


class Pool:
    """Machines and the variants on them.

    Two variants may share a machine, so each has a port of its own; as ports take turns, a variant that found one in
    use gets another one the next time.
    """

    def __init__(self, room: Mapping[str, int], each: int, port: int, used: Collection[int] = ()) -> None:
        """room: how many variants each machine has room for. each: machines of a variant. port: the first.

        used: ports at which other programs listen.
        """
        self._room = dict(room)
        self._each = each
        self._ports = cycle([each for each in range(port, min(port + PORTS, 65536)) if each not in used])
        self._taken: list[Place] = []

    def take(self, resting: Collection[str] = ()) -> Place | None:
        """The machines with the fewest variants, without those that rest; None while too few have room, or all ports
        are taken.
        """
        load = {node: sum(node in place.nodes for place in self._taken) for node in self._room}
        free = [node for node, room in self._room.items() if load[node] < room and node not in resting]
        if len(free) < self._each:
            return None
        ports = {place.port for place in self._taken}
        port = next((port for port in islice(self._ports, PORTS) if port not in ports), None)
        if port is None:
            return None
        place = Place(tuple(sorted(free, key=lambda node: load[node])[: self._each]), port)
        self.occupy(place)
        return place

    def occupy(self, place: Place) -> None:
        """A variant runs there already."""
        self._taken.append(place)

    def release(self, place: Place) -> None:
        self._taken.remove(place)


def room(job: Job, entry: NodeEntry, node: NodeFacts, *, others: bool = False) -> int:
    """How many variants the machine has room for: by its GPUs if the job asks for a number of them, else one.

    others: machines of the pool have GPUs, and then one without has no room for `all`.
    """
    count = job.gpus_of(entry)
    if count == "all" and others and not node.gpus and fault(node) is None:
        return 0
    if not isinstance(count, int) or not count or entry.host == LOCAL:
        return 1
    return len(devices(node)) // count


def no_room(job: Job, entry: NodeEntry, node: NodeFacts) -> NodeUnfit:
    """Why it has room for none."""
    try:
        select(node, job.gpus_of(entry))
    except NodeUnfit as error:
        return error
    return has_none(node)
