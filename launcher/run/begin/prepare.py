"""Prepare a job's nodes for its plan: the same image on all of them, its data, and addresses that all can reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from launcher import features
from launcher.image import cuda
from launcher.image.ensure import ensure
from launcher.image.image_locations import ImageLocations, image_store
from launcher.image.probe import image_facts
from launcher.job.models import Job
from launcher.model.container import WANTED_ULIMITS, ContainerSpec
from launcher.model.facts import ImageFacts, ImageInfo, NodeFacts, login_of
from launcher.model.plan import Plan, Rendezvous, RunId, new_run_id
from launcher.model.progress import Log, OnProgress, no_progress
from launcher.node.connect import Fleet, caller_engine
from launcher.node.engine import Engine
from launcher.node.parallel import run_both
from launcher.planning import gpus
from launcher.planning.allotment import Allotment
from launcher.planning.build import Prepared, build
from launcher.planning.containers import assumed_data
from launcher.planning.offline import assumed_image
from launcher.planning.rendezvous import choose, on_one_machine
from launcher.records.trainer import decoder_source
from launcher.run.begin.gpus import assume_idle, job_facts, uses_gpus
from launcher.run.begin.reachability import probe_master
from launcher.run.locate import caller

# A step of a feature. Returns the facts that the plan is made from. Raises LauncherError.
PreparingStep: TypeAlias = Callable[[Job, Fleet, Sequence[NodeFacts], Log, OnProgress, Path], list[NodeFacts]]


def prepare(
    job: Job,
    fleet: Fleet,
    allotment: Allotment,
    log: Log,
    on_progress: OnProgress = no_progress,
    lock_file: Path | None = None,
    *,
    here: Path,
) -> Prepared:
    """Copy image and data to every node and return what the plan of a run needs.

    lock_file: pins the job's base image. here: the folder from which the job's relative paths count. Raises
    NodesFailed, ImageUnfit and other LauncherErrors; an error can leave behind only images and data.
    """
    rendezvous = choose_rendezvous(job, fleet, allotment)  # first: it takes tenths of a second, and an image minutes
    image, facts = make_image(job, fleet, allotment.facts, log, on_progress, lock_file)
    for feature in features.FEATURES.values():
        for key in feature.steps:
            if getattr(job, key):
                step: PreparingStep = features.load(feature.steps[key])
                facts = step(job, fleet, facts, log, on_progress, here)
    return Prepared(replace(allotment, facts=facts), image, rendezvous)


def preview(job: Job, fleet: Fleet, code: str) -> Plan:
    """Return the plan of a run that starts once the GPUs are idle, without building, copying or pulling images."""
    allotment, busy = assume_idle(job, job_facts(job, fleet, gpus=True))
    image, facts, notes = inspect_image(job, fleet, allotment.facts)
    facts = [replace(node, data=assumed_data(job, node.home)) for node in facts]
    notes += tuple(
        f"data {data.name}: from {data.source}; the folders of its copies are assumed, as up names them by content"
        for data in job.data
    )
    rendezvous = choose_rendezvous(job, fleet, allotment)
    plan = make_plan(job, Prepared(replace(allotment, facts=facts), image, rendezvous), code)
    return replace(plan, warnings=(*busy, *notes, *plan.warnings))


def make_plan(job: Job, prepared: Prepared, code: str, run: RunId | None = None, *, watched: bool = True) -> Plan:
    """Return the plan of a run. code: digest of the code archive. run: its ID, else a new one. watched: somebody may
    answer a breakpoint() of the program. Raises the errors of planning.build.
    """
    now = int(time.time())
    own = run or new_run_id(job.name)
    return build(job, own, prepared, code=code, owner=caller(), created=now, watched=watched)


def choose_rendezvous(job: Job, fleet: Fleet, allotment: Allotment) -> Rendezvous:
    """Return the rendezvous address, after testing that all nodes can reach it, at the port of the allotment."""
    facts, port = allotment.facts, allotment.port
    if job.traits.one_machine:
        return on_one_machine(len(job.machines), port)
    addresses = [entry.address for entry in job.machines]
    probes = probe_master(fleet, facts, port, addresses[0])
    return choose(facts, probes, port, addresses)


def inspect_image(
    job: Job, fleet: Fleet, facts: Sequence[NodeFacts]
) -> tuple[ImageFacts, list[NodeFacts], tuple[str, ...]]:
    """Return the image's properties as found on the nodes, the facts, and notes on assumptions."""
    if not job.traits.has_images or job.image is None:
        return _own_python(job, fleet, facts)
    name = job.image.ref or job.image.base or ""

    def inspect(engine: Engine) -> tuple[ImageInfo | None, tuple[tuple[str, int], ...]]:
        image = image_store(engine).inspect(name)
        return image, WANTED_ULIMITS if image is None else engine.granted_ulimits(name)

    images = fleet.each(inspect)
    limited = [replace(node, ulimits=limits) for node, (_, limits) in zip(facts, images, strict=True)]
    if images[0][0] is None:
        _check_cuda(job, facts, cuda.of_name(name), name)
        note = f"image {name} is not on {fleet.engines[0].node} yet; its properties are assumed"
        return assumed_image(job), limited, (note,)
    notes = (
        () if job.image.ref else (f"the image's properties are those of its base {name}; up repairs it if necessary",)
    )
    found = image_facts(fleet.engines[0], name, images[0][0], _container_like(job, facts[0]))
    if job.image.base and decoder_source(job):
        found = replace(found, decoder=found.decoder or "image")  # `up` builds it in
    return found, limited, (*notes, *_check_cuda(job, facts, found.cuda, name, found.torch, images[0][0].gpu_code))


def _own_python(
    job: Job, fleet: Fleet, facts: Sequence[NodeFacts]
) -> tuple[ImageFacts, list[NodeFacts], tuple[str, ...]]:
    """Return the properties of the Python for plain processes, and notes on torch and driver if torch is used."""
    found = image_facts(fleet.engines[0], "", None, _container_like(job, facts[0]))
    return found, list(facts), tuple([] if job.run.command else _check_cuda(job, facts, found.cuda, "", found.torch))


def _check_cuda(
    job: Job, facts: Sequence[NodeFacts], version: str, image: str, torch: str = "", gpu_code: str = ""
) -> list[str]:
    """Apply cuda.check() to the nodes with the GPUs that the job uses."""
    users = [gpus.only_used(node, job.gpus_of(entry)) for entry, node in zip(job.machines, facts, strict=True)]
    return cuda.check([node for node in users if node.gpus], version, image, torch, gpu_code)


def _container_like(job: Job, master: NodeFacts) -> ContainerSpec:
    """Return the settings of the first node's container, without image and command."""
    user, groups = login_of(master)
    return ContainerSpec(
        "",
        "",
        (),
        env=job.env_of(job.nodes[0]),
        user=user,
        groups=groups,
        mounts=tuple(mount.with_home(master.home) for mount in job.mounts),
    )


def make_image(
    job: Job, fleet: Fleet, facts: Sequence[NodeFacts], log: Log, on_progress: OnProgress, lock_file: Path | None
) -> tuple[ImageFacts, list[NodeFacts]]:
    """Provide the job's image on every node; return its properties and the facts with the granted ulimits."""
    if not job.traits.has_images or job.image is None:
        own, seen, notes = _own_python(job, fleet, facts)
        for note in notes:
            log(f"note: {note}")
        return own, seen
    name = job.image.base or job.image.ref or ""
    _check_cuda(job, facts, cuda.of_name(name), name)  # before it is pulled
    with caller_engine() as local:
        locations = ImageLocations(fleet.engines, local, log, on_progress, uses_gpus(job))
        decoder, mounted = decoder_source(job), bool(job.mounts)
        image = ensure(job.image, locations, job=job.name, mounted=mounted, roi=decoder, lock_file=lock_file)
    master = fleet.engines[0]
    info = image.images[master.node]
    _check_cuda(job, facts, info.cuda, name)  # before the first container
    granted, found = run_both(
        partial(fleet.each, lambda engine: engine.granted_ulimits(image.ids[engine.node])),
        partial(image_facts, master, image.reference, info, _container_like(job, facts[0])),
    )
    for note in _check_cuda(job, facts, found.cuda, name, found.torch, info.gpu_code):
        log(f"note: {note}")
    limited = [
        replace(node, ulimits=limits, image=image.ids[engine.node])
        for engine, node, limits in zip(fleet.engines, facts, granted, strict=True)
    ]
    return found, limited
