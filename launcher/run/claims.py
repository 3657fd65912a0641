"""Which run has which GPU, and which port of a master: a claim each, a name that the node gives to one run only.

The claim follows the run's own container, so that a claim without a container is one whose owner is gone: the
next run that wants the same removes it. A run that has ended holds nothing either.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from launcher.errors import InUse
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import NodePlan
from launcher.node.engine import Engine

ABANDONED = 600.0  # seconds after which a container that was created and never started counts as forgotten


def claim_gpus(engine: Engine, planned: NodePlan) -> None:
    """Claim all GPUs of this node's plan, whose container has been created. Raises InUse with the run that has one.

    What was claimed before it raises goes with the run's containers. `launcher shell` claims none: it is for looking
    at things while a run goes on.
    """
    if planned.container.labels[labels.PURPOSE] == "shell":
        return
    for uuid in sorted(planned.container.gpus):  # in one order everywhere: of two runs one gets the first
        if holder := _claim(engine, planned, f"gpu-{uuid}"):
            run, where = holder.get(labels.RUN, "?"), f"node {planned.node}"
            what = f"GPU {uuid} is in use by the run {run} of {holder.get(labels.OWNER, '?')}"
            cure = f"wait for it: --wait; choose others: gpus; or end that run: launcher down {run} --nodes"
            raise InUse(where, what, f"{cure} {engine.host}")


def claim_port(engine: Engine, planned: NodePlan, port: int) -> None:
    """Claim the port where the nodes of a run will meet, on its master: nothing listens there before it has started.

    Raises InUse with the run that has it.
    """
    if holder := _claim(engine, planned, f"port-{port}"):
        run, owner = holder.get(labels.RUN, "?"), holder.get(labels.OWNER, "?")
        what = f"port {port}, where the ranks would meet, is claimed by the run {run} of {owner}"
        cure = (
            f"wait for it: --wait; choose another: --set port={port + 1}; or end that run: launcher down {run} --nodes"
        )
        raise InUse(f"node {planned.node}", what, f"{cure} {engine.host}")


def _claim(engine: Engine, planned: NodePlan, name: str) -> Mapping[str, str] | None:
    """None: this run has it now; else the labels of the claim that has it."""
    spec = planned.container
    keep = (labels.RUN, labels.JOB, labels.OWNER, labels.CREATED, labels.VERSION)
    marks = {**{label: spec.labels[label] for label in keep}, labels.PURPOSE: "claim"}
    while (holder := engine.claim(f"launcher-{name}", spec.image, marks)) is not None:
        if holder.labels.get(labels.RUN) == marks[labels.RUN]:
            return None
        if _alive(engine, holder):
            return holder.labels
        engine.remove(holder.id)  # by its id: never a new claim of another run
    return None


def _alive(engine: Engine, holder: ContainerState) -> bool:
    """Whether the run with the claim has a container here that runs, or is about to."""
    run = holder.labels.get(labels.RUN)
    if run is None:
        return True  # not ours: another program's container of that name
    age = time.time() - float(holder.labels.get(labels.CREATED, "0") or 0)
    return any(
        not state.phase.ended and not (state.phase is Phase.CREATED and age > ABANDONED)
        for state in engine.list({labels.RUN: run})
        if state.labels.get(labels.PURPOSE) != "claim"
    )
