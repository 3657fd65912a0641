"""GPUs as they are now: who has them, and whether a job gets those that it asks for, before anything is created."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

from launcher.errors import InUse, NodesFailed
from launcher.job.models import Job
from launcher.model.facts import NodeFacts
from launcher.model.progress import Log, Step
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.planning.build import choose_gpus
from launcher.run.claims import claimed_gpus

PAUSE = 3.0  # seconds between two tries


def with_claims(engine: Engine) -> NodeFacts:
    """The node's facts, with the GPUs that runs of the launcher have. Raises NodeUnreachable, NodeUnfit, ..."""
    node = engine.facts()
    return replace(node, claims=claimed_gpus(engine)) if node.gpus else node


def job_facts(job: Job, fleet: Fleet) -> list[NodeFacts]:
    """The facts of the job's nodes, as its plan needs them. Raises NodesFailed."""
    return fleet.each(with_claims) if counts(job) else fleet.facts()


def counts(job: Job) -> bool:
    """Whether it asks for a number of GPUs, which means idle ones."""
    return any(isinstance(job.gpus_of(entry), int) for entry in job.machines)


def uses_gpus(job: Job) -> bool:
    """Whether it asks for GPUs on any node."""
    return any(job.gpus_of(entry) != "none" for entry in job.machines)


def settle(job: Job, fleet: Fleet, waiting: Waiting) -> list[NodeFacts]:
    """The facts of the job's nodes, whose GPUs are enough for the job; as soon as they are where it may wait.

    Raises NodesFailed with every node whose GPUs cannot be used, are too few or in use.
    """
    while True:
        facts = job_facts(job, fleet)
        try:
            chosen = choose_gpus(job, facts)
        except NodesFailed as error:
            waiting.after(error)
            continue
        if not any(chosen) and any(job.gpus_of(entry) == "all" for entry in job.machines):
            waiting.log("warning: NO GPU: no node has one, so this runs on processors. Without this line: gpus: none")
        return facts


def as_if_idle(job: Job, facts: Sequence[NodeFacts]) -> tuple[Sequence[NodeFacts], tuple[str, ...]]:
    """For a plan that is only shown: where the job has to wait for GPUs, the facts without their users, and a note.

    Raises NodesFailed where waiting does not help.
    """
    try:
        choose_gpus(job, facts)
    except NodesFailed as error:
        rule = "`up` refuses this now and `up --wait` waits; this plan shows each node's first GPUs"
        idle = [
            replace(node, claims=(), gpus=tuple(replace(gpu, used_mib=0, processes=()) for gpu in node.gpus))
            for node in facts
        ]
        return idle, (f"{_in_use(error)}. {rule}",)
    return facts, ()


def _in_use(error: NodesFailed) -> str:
    """Who has what on each node. Raises `error` unless each node's GPUs are in use, and that is all."""
    if not all(isinstance(each, InUse) for each in error.errors):
        raise error
    return "; ".join(f"{each.where}: {each.what}" for each in error.errors)


class Waiting:
    """Waits for GPUs that others use, and says for which; the same words once, as it may try for hours."""

    def __init__(self, log: Log, *, wait: bool) -> None:
        self.log = log
        self._wait = wait
        self._said = ""

    def after(self, error: NodesFailed) -> None:
        """Pause until the next try. Raises `error` unless it is to wait and each node's GPUs are in use."""
        if not self._wait:
            raise error
        step = Step("waiting", _in_use(error), at_once=True)
        if step != self._said:
            self._said = step
            self.log(step)
        time.sleep(PAUSE + random.random())  # noqa: S311 - two that wait must not keep in step
