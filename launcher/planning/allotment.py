"""What a run gets of its machines: decided together, from their facts, and handed on;
again, as a whole, if another run was faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import LauncherError, NodesFailed, NodeUnfit, PlanInvalid
from launcher.job.models import Job
from launcher.model.facts import NodeFacts
from launcher.planning import checks, command, gpus, ports


@dataclass(frozen=True)
class Allotment:
    """Nodes that can run a job, and what it gets of them.

    facts, gpus, workers: by rank; gpus: the UUIDs of the node's GPUs. port: of the rendezvous.
    """

    facts: Sequence[NodeFacts]
    gpus: Sequence[tuple[str, ...]]
    workers: Sequence[int]
    port: int

    @property
    def exclusive(self) -> tuple[Sequence[tuple[str, ...]], int]:
        """What no other run may use at the same time."""
        return self.gpus, self.port


def allot(job: Job, facts: Sequence[NodeFacts]) -> Allotment:
    """Choose the GPUs of each node and the port.

    Raises NodesFailed with every node whose GPUs cannot be used, are too few or in use, or whose port is in use: only
    InUse if waiting for other users helps. Then NodesFailed as `refuse_unfit`, and PlanInvalid.
    """
    uuids, port, errors = list[tuple[str, ...]](), 0, list[LauncherError]()
    try:
        port = ports.choose(job, facts)
    except NodesFailed as error:
        errors.append(error)
    try:
        uuids = _choose_gpus(job, facts)
    except NodesFailed as error:
        errors.append(error)
    if errors:
        raise NodesFailed(errors, of=len(facts))  # of the nodes: each of these errors contains theirs
    workers = _count_workers(job, uuids)
    refuse_unfit(job, facts)
    return Allotment(facts, uuids, workers, port)


def _choose_gpus(job: Job, facts: Sequence[NodeFacts]) -> list[tuple[str, ...]]:
    """Return the UUIDs of each node's GPUs, by rank.

    Raises NodesFailed, which contains only InUse if waiting for other users helps.
    """
    chosen: list[tuple[str, ...]] = []
    errors: list[LauncherError] = []
    without: list[NodeFacts] = []
    ranks: dict[str, list[int]] = {}  # by host
    for rank, entry in enumerate(job.machines):
        ranks.setdefault(entry.host, []).append(rank)
    for rank, (entry, node) in enumerate(zip(job.machines, facts, strict=True)):
        try:
            uuids = gpus.select(node, job.gpus_of(entry))
        except NodeUnfit as error:
            errors.append(error)
            continue
        if job.gpus_of(entry) == "all" and not uuids:
            without.append(node)
        same = ranks[entry.host]
        chosen.append(gpus.share(uuids, len(same), same.index(rank)) if entry.gpus is None else uuids)
    if any(chosen):  # `all` would mean CPUs there, and the other nodes would wait for them
        errors += [gpus.has_none(node) for node in without]
    if errors:
        raise NodesFailed(errors, of=len(facts))
    return chosen


def _count_workers(job: Job, uuids: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the number of workers of each node, from its GPUs. Raises PlanInvalid."""
    counts = [command.workers(job, len(mine)) for mine in uuids]
    if job.min_nodes and len(set(counts)) > 1:
        listed = ", ".join(f"{entry.name} {count}" for entry, count in zip(job.machines, counts, strict=True))
        raise PlanInvalid("min_nodes", f"all nodes must have the same number of workers, but they have: {listed}")
    return counts


def refuse_unfit(job: Job, facts: Sequence[NodeFacts]) -> None:
    """Raise NodesFailed with each node that cannot run the job whatever its image is."""
    found = [checks.engine(node, job) for node in facts if node.engine]
    found += [check for node in facts for check in checks.output(node, job)]
    found += checks.one_machine(facts)
    if (needed := job.resources.output) is not None:
        found += [checks.output_room(node, needed) for node in facts]
    unfit = [check for check in found if check.level is checks.Level.FAIL]
    if unfit:
        raise NodesFailed([NodeUnfit(f"node {check.node}", check.what, check.fix) for check in unfit], of=len(facts))
