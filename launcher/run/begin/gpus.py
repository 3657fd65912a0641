"""Current use of the nodes' GPUs and ports, and what a job gets of them, before anything is created."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from launcher.errors import InUse, NodesFailed
from launcher.job.models import Job
from launcher.model.facts import NodeFacts
from launcher.model.progress import Log, StatusLine
from launcher.node.connect import Fleet
from launcher.planning.allotment import Allotment, allot
from launcher.records.paths import RUNS, RunPaths
from launcher.records.store import Record
from launcher.run.begin.claims import with_claims

PAUSE = 3.0  # seconds between two attempts


def job_facts(job: Job, fleet: Fleet, *, gpus: bool | None = None) -> list[NodeFacts]:
    """Return the facts of the job's nodes that its plan needs. gpus: also which GPUs are locked; None: if the job
    needs it.

    Raises NodesFailed.
    """
    needs = wants_a_number(job) if gpus is None else gpus
    need_port = fleet.engines if job.min_nodes else fleet.engines[:1]
    return fleet.each(lambda engine: with_claims(engine, gpus=needs, port=engine in need_port))


def wants_a_number(job: Job) -> bool:
    """Return whether the job requests a number of GPUs, which must be idle."""
    return any(isinstance(job.gpus_of(entry), int) for entry in job.machines)


def uses_gpus(job: Job) -> bool:
    """Return whether the job requests GPUs on any node."""
    return any(job.gpus_of(entry) != "none" for entry in job.machines)


def wait_for_gpus(job: Job, fleet: Fleet, waiting: Waiting) -> Allotment:
    """Return what the job gets of its nodes once they have enough GPUs for it and its port is free.

    Without --wait, raises the errors of `allot` instead of waiting.
    """
    while True:
        facts = job_facts(job, fleet)
        try:
            return allot(job, facts)
        except NodesFailed as error:
            waiting.after(error)


def warn_without_gpus(job: Job, allotment: Allotment, log: Log) -> None:
    """Warn if a job that asks for all GPUs gets none."""
    if not any(allotment.gpus) and any(job.gpus_of(entry) == "all" for entry in job.machines):
        log("warning: NO GPU: no node has a GPU, so this job runs on CPUs. To silence this warning, set gpus: none")


def assume_idle(job: Job, facts: Sequence[NodeFacts]) -> tuple[Allotment, tuple[str, ...]]:
    """For a plan that is only displayed: if GPUs or the port are in use, return what it gets when they are not, and a
    note.

    Raises NodesFailed if waiting does not help.
    """
    try:
        return allot(job, facts), ()
    except NodesFailed as error:
        rule = "`up` fails now, `up --wait` waits"
        if wants_a_number(job):
            rule += "; this plan shows the first GPUs of each node"
        idle = [
            replace(
                node,
                claims=(),
                gpus=tuple(replace(gpu, used_mib=0, processes=()) for gpu in node.gpus),
                listening=(),
                port_claims=(),
            )
            for node in facts
        ]
        return allot(job, idle), (f"{in_use(error)}. {rule}",)


def in_use(error: NodesFailed) -> str:
    """Return who uses which GPUs and ports. Raises `error` if a node failed for another reason."""
    if not all(isinstance(each, InUse) for each in error.errors):
        raise error
    return "; ".join(f"{each.where}: {each.what}" for each in error.errors)


class Waiting:
    """Wait for GPUs and ports in use and log which; repeat no message, as the wait may take hours.

    wait: however long it takes; otherwise only for runs that this folder is stopping. runs: folder of the records.
    """

    def __init__(self, log: Log, *, wait: bool, runs: Path = RUNS) -> None:
        self.log = log
        self._wait = wait
        self._runs = runs
        self._logged = ""

    def after(self, error: NodesFailed) -> None:
        """Pause until the next attempt. Raises `error` if waiting is disabled or would not help."""
        if not self._wait and not self._soon_free(error):
            raise error
        step = StatusLine("waiting", in_use(error), immediate=True)
        if step != self._logged:
            self._logged = step
            self.log(step)
        time.sleep(PAUSE + random.random())  # noqa: S311 - waiting launchers must not retry in lockstep

    def _soon_free(self, error: NodesFailed) -> bool:
        """Whether all that is in use is of runs that a `down` or a second Ctrl-C in this folder is just stopping."""
        holders = [each.runs if isinstance(each, InUse) else () for each in error.errors]
        records = [[Record(RunPaths(self._runs / run)) for run in runs] for runs in holders]
        return all(own and all(record.being_stopped for record in own) for own in records)
