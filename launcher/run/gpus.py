"""GPUs as they are now: who has them, and whether a job gets those that it asks for, before anything is created."""

from __future__ import annotations

import random
import time
from dataclasses import replace

from launcher.errors import InUse, NodesFailed
from launcher.job.models import Job
from launcher.model.facts import NodeFacts
from launcher.model.progress import Log
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


def settle(job: Job, fleet: Fleet, *, wait: bool, log: Log) -> list[NodeFacts]:
    """The facts of the job's nodes, whose GPUs are enough for the job; with `wait` as soon as they are.

    Raises NodesFailed with every node whose GPUs cannot be used, are too few or in use.
    """
    said = ""
    while True:
        facts = job_facts(job, fleet)
        try:
            chosen = choose_gpus(job, facts)
        except NodesFailed as error:
            if (line := waiting(error, wait=wait)) != said:
                log(said := line)
            pause()
            continue
        if not any(chosen) and any(job.gpus_of(entry) == "all" for entry in job.machines):
            log("warning: NO GPU: no node has one, so this runs on processors. Without this line: gpus: none")
        return facts


def waiting(error: NodesFailed, *, wait: bool) -> str:
    """The line to show before the next try. Raises `error` unless `wait` is set and each node's GPUs are in use."""
    if not wait or not all(isinstance(each, InUse) for each in error.errors):
        raise error
    return "waiting: " + "; ".join(f"{each.where}: {each.what}" for each in error.errors)


def pause() -> None:
    """Between two tries to get GPUs."""
    time.sleep(PAUSE + random.random())  # noqa: S311 - two that wait must not keep in step
