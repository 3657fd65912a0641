"""Plan without connecting to any machine: the facts are assumed, and the warnings of the plan list them."""

from __future__ import annotations

import dataclasses

from launcher.job.models import Job
from launcher.job.scalars import Gpus
from launcher.model.container import WANTED_ULIMITS
from launcher.model.facts import Gpu, ImageFacts, Interface, Launch, NodeFacts, Route
from launcher.model.plan import Plan, Rendezvous
from launcher.planning import build
from launcher.planning.allotment import allot
from launcher.planning.containers import assumed_data
from launcher.planning.rendezvous import on_one_machine

_NETWORK = "192.0.2"  # TEST-NET-1 (RFC 5737): no machine has these addresses
_USER = 1000
GPUS = 8  # of a node, if the job requests `all`


def offline(job: Job, code: str) -> Plan:
    """Return the plan for typical nodes: Linux, uid 1000, the GPUs that the job requests, a current torch."""
    count = len(job.machines)
    allotment = allot(job, [_node(job, rank) for rank in range(count)])
    if job.traits.one_machine or count == 1:
        rendezvous = on_one_machine(count, job.port)
    else:
        own = tuple(entry.address or f"{_NETWORK}.{rank + 1}" for rank, entry in enumerate(job.machines))
        rendezvous = Rendezvous(own[0], job.port, own, ("eth0",) * count, probed=True)
    prepared = build.Prepared(allotment, assumed_image(job), rendezvous)
    plan = build.build(job, f"{job.name}-00000000-000000-0000", prepared, code=code, owner="", created=0)
    notes = ["offline: addresses, interfaces, users, GPUs and image features are assumed; no node was contacted"]
    if unknown := [entry.name for entry in job.machines if job.gpus_of(entry) == "all"]:
        notes.append(f"gpus: all is assumed to be {GPUS} GPUs per machine ({', '.join(unknown)})")
    notes += [
        f"data {data.name}: from {data.source}; the paths are placeholders, as up names copies by content"
        for data in job.data
    ]
    return dataclasses.replace(plan, warnings=(*notes, *plan.warnings))


def assumed_image(job: Job) -> ImageFacts:
    """Return the facts of an image with a current torch, for an image that has not been inspected."""
    return ImageFacts(
        reference=job.image.ref or job.image.base or "" if job.image else "",
        id="",
        python="python3",
        launch=Launch.RUN,
        flags=frozenset({"no_python", "rdzv_backend", "max_restarts", "log_dir"}),
        torch="",
        entrypoint=(),
    )


def _gpus(request: Gpus) -> tuple[Gpu, ...]:
    """Return the GPUs that the job names or counts; for `all`, GPUS of them."""
    count = {"none": 0, "all": GPUS}[request] if isinstance(request, str) else request
    wanted = range(count) if isinstance(count, int) else count
    return tuple(
        Gpu(i, f"GPU-assumed-{i}", "", 0, "") if isinstance(i, int) else Gpu(index, str(i), "", 0, "")
        for index, i in enumerate(wanted)
    )


def _node(job: Job, rank: int) -> NodeFacts:
    entry = job.machines[rank]
    return NodeFacts(
        name=entry.name,
        host=entry.host,
        hostname=entry.name,
        arch="x86_64",
        user="user",
        uid=_USER,
        gid=_USER,
        groups=(_USER,),
        home="/home/user",
        cpus=1,
        interfaces=(Interface("eth0", (f"{_NETWORK}.{rank + 1}/24",)),),
        routes=(Route("0.0.0.0/0", "eth0"),),
        gpus=_gpus(job.gpus_of(entry)),
        python="" if job.traits.has_images else "python3",
        ulimits=WANTED_ULIMITS if job.traits.has_limits else (),
        data=assumed_data(job, "/home/user"),
    )
