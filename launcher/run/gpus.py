"""Current use of the nodes' GPUs and ports, and whether a job can get what it requests, before anything is created."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from launcher.errors import InUse, LauncherError, NodesFailed
from launcher.job.models import Job
from launcher.model.facts import NodeFacts
from launcher.model.progress import Log, Step
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.planning.build import choose_gpus, ports_in_use
from launcher.run.claims import claimed_gpus, claimed_port

PAUSE = 3.0  # seconds between two attempts


def with_claims(engine: Engine, port: int = 0, *, gpus: bool = True) -> NodeFacts:
    """Return the node's facts with the GPUs that runs have locked, and the run that uses the port.

    Raises NodeUnreachable, NodeUnfit, ...
    """
    node = engine.facts()
    return replace(
        node,
        claims=claimed_gpus(engine) if gpus and node.gpus else (),
        port_claim=claimed_port(engine, port) if port in node.listening else None,
    )


def job_facts(job: Job, fleet: Fleet) -> list[NodeFacts]:
    """Return the facts of the job's nodes that its plan needs. Raises NodesFailed."""
    return fleet.each(partial(with_claims, port=job.port, gpus=counts(job)))


def counts(job: Job) -> bool:
    """Return whether the job requests a number of GPUs, which must be idle."""
    return any(isinstance(job.gpus_of(entry), int) for entry in job.machines)


def uses_gpus(job: Job) -> bool:
    """Return whether the job requests GPUs on any node."""
    return any(job.gpus_of(entry) != "none" for entry in job.machines)


def wait_for_gpus(job: Job, fleet: Fleet, waiting: Waiting) -> list[NodeFacts]:
    """Return the facts of the job's nodes when they have enough GPUs for it and its port is free; wait if allowed.

    Raises NodesFailed with every node whose GPUs cannot be used, are too few or in use, or whose port is in use.
    """
    while True:
        facts = job_facts(job, fleet)
        try:
            chosen = _choose(job, facts)
        except NodesFailed as error:
            waiting.after(error)
            continue
        if not any(chosen) and any(job.gpus_of(entry) == "all" for entry in job.machines):
            waiting.log(
                "warning: NO GPU: no node has a GPU, so this job runs on CPUs. To silence this warning, set gpus: none"
            )
        return facts


def _choose(job: Job, facts: Sequence[NodeFacts]) -> list[tuple[str, ...]]:
    """Return the UUIDs of each node's GPUs, by rank. Raises NodesFailed, also if a rendezvous port is in use."""
    errors: list[LauncherError] = [*ports_in_use(job, facts)]
    try:
        chosen = choose_gpus(job, facts)
    except NodesFailed as error:
        raise NodesFailed([*errors, error], of=len(facts)) from error
    if errors:
        raise NodesFailed(errors, of=len(facts))
    return chosen


def assume_idle(job: Job, facts: Sequence[NodeFacts]) -> tuple[Sequence[NodeFacts], tuple[str, ...]]:
    """For a plan that is only displayed: if GPUs or the port are in use, return the facts as if not, and a note.

    Raises NodesFailed if waiting does not help.
    """
    try:
        _choose(job, facts)
    except NodesFailed as error:
        rule = "`up` fails now, `up --wait` waits"
        if counts(job):
            rule += "; this plan shows the first GPUs of each node"
        idle = [
            replace(
                node,
                claims=(),
                gpus=tuple(replace(gpu, used_mib=0, processes=()) for gpu in node.gpus),
                listening=tuple(port for port in node.listening if port != job.port),
            )
            for node in facts
        ]
        return idle, (f"{_in_use(error)}. {rule}",)
    return facts, ()


def _in_use(error: NodesFailed) -> str:
    """Return who uses which GPUs and ports. Raises `error` if a node failed for another reason."""
    if not all(isinstance(each, InUse) for each in error.errors):
        raise error
    return "; ".join(f"{each.where}: {each.what}" for each in error.errors)


class Waiting:
    """Wait for GPUs and ports in use and log which; repeat no message, as the wait may take hours."""

    def __init__(self, log: Log, *, wait: bool) -> None:
        self.log = log
        self._wait = wait
        self._logged = ""

    def after(self, error: NodesFailed) -> None:
        """Pause until the next attempt. Raises `error` if waiting is disabled or would not help."""
        if not self._wait:
            raise error
        step = Step("waiting", _in_use(error), immediate=True)
        if step != self._logged:
            self._logged = step
            self.log(step)
        time.sleep(PAUSE + random.random())  # noqa: S311 - waiting launchers must not retry in lockstep
