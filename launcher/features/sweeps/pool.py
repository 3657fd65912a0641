"""Assign machines of a pool and a rendezvous port to the variants of a sweep."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import cycle, islice

from launcher.errors import NodeUnfit
from launcher.job.models import Job
from launcher.job.parts import NodeEntry
from launcher.job.scalars import LOCAL
from launcher.model.facts import NodeFacts
from launcher.planning.gpu_faults import fault
from launcher.planning.gpus import devices, has_none, select


@dataclass(frozen=True)
class Placement:
    """Machines of a variant, by name, the master first, and its rendezvous port."""

    nodes: tuple[str, ...]
    port: int


PORTS = 1000  # number of ports, starting with that of a job which gives one


class Pool:
    """Machines and the variants on them.

    Two variants may share a machine, so each has its own port. Ports are assigned in turn: a variant whose port was in
    use gets another one next time.
    """

    def __init__(
        self, room: Mapping[str, int], each: int, port: int, used: Collection[int] = (), most: int = PORTS
    ) -> None:
        """room: capacity of each machine in variants. each: machines per variant. port: the first of `most` ports.

        used: those that others use.
        """
        self._room = dict(room)
        self._each = each
        self._ports = cycle([each for each in range(port, min(port + most, 65536)) if each not in used])
        self._taken: list[Placement] = []

    def take(self, resting: Collection[str] = ()) -> Placement | None:
        """Return the machines with the fewest variants, except those in `resting`; None if too few machines or no port
        are free.
        """
        load = {node: sum(node in placement.nodes for placement in self._taken) for node in self._room}
        free = [node for node, room in self._room.items() if load[node] < room and node not in resting]
        if len(free) < self._each:
            return None
        ports = {placement.port for placement in self._taken}
        port = next((port for port in islice(self._ports, PORTS) if port not in ports), None)
        if port is None:
            return None
        placement = Placement(tuple(sorted(free, key=lambda node: load[node])[: self._each]), port)
        self.occupy(placement)
        return placement

    def occupy(self, placement: Placement) -> None:
        """Record that a variant is already running there."""
        self._taken.append(placement)

    def release(self, placement: Placement) -> None:
        self._taken.remove(placement)


def room(job: Job, entry: NodeEntry, node: NodeFacts, *, others: bool = False) -> int:
    """Return the capacity of the machine in variants: by its GPUs if the job asks for a number of them, else one.

    others: machines of the pool have GPUs; then a machine without GPUs has no room for `all`.
    """
    count = job.gpus_of(entry)
    if count == "all" and others and not node.gpus and fault(node) is None:
        return 0
    if not isinstance(count, int) or one_at_a_time(job, entry):
        return 1
    return len(devices(node)) // count


def one_at_a_time(job: Job, entry: NodeEntry) -> bool:
    """Return whether the machine runs one variant; else as many as have GPUs there."""
    count = job.gpus_of(entry)
    return not isinstance(count, int) or not count or entry.host == LOCAL


def no_room(job: Job, entry: NodeEntry, node: NodeFacts) -> NodeUnfit:
    """Return the reason why the machine has no room for a variant."""
    try:
        select(node, job.gpus_of(entry))
    except NodeUnfit as error:
        return error
    return has_none(node)
