"""Build the plan of a run from the job and the facts, without I/O. As in `containers`, a node is the facts about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from launcher.errors import PlanInvalid
from launcher.job.models import Job
from launcher.model.container import CODE, WANTED_ULIMITS
from launcher.model.facts import ImageFacts, NodeFacts
from launcher.model.plan import NodePlan, Plan, Rendezvous, RunId
from launcher.planning import checks, command, containers, gpu_checks, gpus, rdma
from launcher.planning.allotment import Allotment
from launcher.planning.rendezvous import is_tunnel

_LIMITS = {"memlock": "locked memory", "stack": "the stack"}
_WARNED = ("clock", "shared memory")  # the checks that `up` warns about; launcher doctor shows the rest


@dataclass(frozen=True)
class Prepared:
    """What a plan needs from the nodes. allotment: its facts have the limits of containers, image IDs and data copies.

    rendezvous: at the allotment's port.
    """

    allotment: Allotment
    image: ImageFacts
    rendezvous: Rendezvous

    def at(self, now: Allotment) -> Prepared:
        """Return the same with a newer allotment: images and data may take so long that others have taken GPUs
        meanwhile.
        """
        kept = [
            replace(new, ulimits=old.ulimits, image=old.image, data=old.data)
            for old, new in zip(self.allotment.facts, now.facts, strict=True)
        ]
        return Prepared(replace(now, facts=kept), self.image, replace(self.rendezvous, port=now.port))


def build(
    job: Job, run: RunId, prepared: Prepared, *, code: str, owner: str, created: int, watched: bool = True
) -> Plan:
    """Return the containers of a run, by node rank. watched: somebody may answer a breakpoint() of the program.

    Raises PlanInvalid for impossible requests, and NodeUnfit for a node whose engine cannot pass its GPUs on.
    """
    image, rendezvous = prepared.image, prepared.rendezvous
    facts, uuids, counts = prepared.allotment.facts, prepared.allotment.gpus, prepared.allotment.workers
    _refuse_script_outside(job)
    network = rdma.choose(facts, image.torch) if len({node.host for node in facts}) > 1 and any(uuids) else ()
    context = command.Context(job, run, image, rendezvous, code, owner, created, network, watched)
    ranks = [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
    nodes = tuple(
        NodePlan(
            node=entry.name,
            host=entry.host,
            rank=rank,
            first_rank=its_ranks.start,
            processes=len(its_ranks),
            container=containers.container(context, entry, node, rank, its_gpus, its_ranks),
            speed=next((i.speed / 1000 for i in node.interfaces if i.name == rendezvous.interfaces[rank]), 0.0),
            rdma=rdma.usable(node, network[rank] if network else ()),
            efa=any(port.efa and port.active for port in node.rdma),
            gpudirect="never" if rdma.without_gpudirect(node) else "loaded" if node.peermem else "",
        )
        for rank, (entry, node, its_gpus, its_ranks) in enumerate(zip(job.machines, facts, uuids, ranks, strict=True))
    )
    return Plan(
        run=run,
        job=job.name,
        runtime=job.runtime,
        image=image.reference,
        image_id=image.id,
        code=code,
        rendezvous=rendezvous,
        nodes=nodes,
        warnings=(*_warnings(job, facts, image, rendezvous, nodes), *_of_network(job, network)),
        min_nodes=job.min_nodes or 0,
        spares=len(job.spares or ()),
    )


def _of_network(job: Job, network: Sequence[Sequence[rdma.Setting]]) -> list[str]:
    """Describe what NCCL is told, unless the job tells it something else."""
    return [
        f"{entry.name}: {setting.name} is set to {setting.value}: {setting.why}"
        for entry, settings in zip(job.machines, network, strict=False)
        for setting in settings
        if setting.name not in job.env_of(entry)
    ]


def _unified_memory(memory: int, limit: int) -> str:
    """Describe the default limit. What CUDA allocates does not count: github.com/graphistry/pygraphistry/pull/1671."""
    return (
        f"its GPU shares the machine's memory, so the container is limited to {limit / (1 << 30):.0f} of "
        f"{memory / (1 << 30):.0f} GiB (resources.memory changes that). What CUDA allocates is not limited by it, and "
        "a full memory hangs the machine: with torch 2.10 or newer, env: {PYTORCH_CUDA_ALLOC_CONF: "
        '"per_process_memory_fraction:0.9"}'
    )


def _refuse_script_outside(job: Job) -> None:
    """Raise PlanInvalid for a script that no container would see."""
    if job.run.script is not None and command.script_in_code(job).startswith(".."):
        raise PlanInvalid(
            f"run.script {job.run.script}",
            f"is outside the code folder {job.code}, and containers see only that folder",
            "move it there, or set `code` to a folder that contains it",
        )


def _warnings(
    job: Job, facts: Sequence[NodeFacts], image: ImageFacts, rendezvous: Rendezvous, nodes: Sequence[NodePlan]
) -> list[str]:
    found = checks.written(job)
    if image.hidden:
        names = ", ".join(image.hidden[:3]) + ", ..." * (len(image.hidden) > 3)
        found.append(f"the job's code at {CODE} hides the image's own files there: {names}")
    if (decoder := checks.decoder(job, image)) and decoder.level is checks.Level.WARN:
        found.append(f"{decoder.what}: {decoder.fix}")
    if not rendezvous.probed:
        found.append(
            f"sshd forbids testing connections between the nodes; {rendezvous.address} is assumed to be reachable"
        )
    registers = any(n.container.gpus for n in nodes) or any(node.infiniband for node in facts)  # memory: NCCL, RDMA
    for limit, _ in WANTED_ULIMITS if job.traits.has_limits else ():
        limited = [node.name for node in facts if limit not in dict(node.ulimits)]
        if limit == "memlock" and not registers:
            continue
        if limited:
            found.append(f"{_LIMITS[limit]} is limited on {', '.join(limited)}")
    if any(map(is_tunnel, rendezvous.interfaces)):
        names = ", ".join(dict.fromkeys(filter(is_tunnel, rendezvous.interfaces)))
        found.append(f"the nodes communicate over {names}, a tunnel, which is slower than the network below it")
    for node, planned in zip(facts, nodes, strict=True):
        found += [
            f"{check.node}: {check.what}. {check.fix}"
            for check in checks.of_node(node, job)
            if check.level is checks.Level.WARN and check.name in _WARNED
        ]
        if job.traits.isolates and (proxies := ", ".join(containers.unpassed_proxies(job, node))):
            found.append(
                f"{node.name}: {proxies} of its ~/.docker/config.json has a password and is not passed to the "
                f"container, as variables are recorded: use secrets: [{proxies}]"
            )
        found += gpu_checks.warnings(node, job.gpus_of(job.machines[planned.rank]), planned.container.gpus)
        if job.resources.memory is None and (most := planned.container.memory):
            found.append(f"{node.name}: {_unified_memory(node.memory, most)}")
        if planned.container.gpus and planned.processes > len(planned.container.gpus):
            found.append(
                f"{node.name}: {planned.processes} workers share {len(planned.container.gpus)} GPUs; "
                "NCCL does not support two ranks on one GPU"
            )
    counts = {n.node: len(n.container.gpus) for n in nodes}
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{node} {count}" for node, count in counts.items())
        found.append(f"the nodes have different numbers of GPUs: {numbers}")
    if sum(n.processes for n in nodes) > 1 and any(map(gpus.is_instance, (u for n in nodes for u in n.container.gpus))):
        found.append(gpu_checks.NCCL_AND_MIG)
    if any(counts.values()) and (differ := gpu_checks.differences([facts[n.rank] for n in nodes if n.container.gpus])):
        found.append(f"the nodes' GPUs differ, and the slowest one limits the speed: {differ}")
    return found
