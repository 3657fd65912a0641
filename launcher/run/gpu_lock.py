"""Which run has which GPU: one claim a GPU on its node, a name that the node gives to one run only.

The claim follows the run's own container, so that a claim without a container is one whose owner is gone: the
next run that wants the GPU removes it. A run that has ended holds nothing either.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from launcher.errors import GpuInUse
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import NodePlan
from launcher.node.engine import Engine

ABANDONED = 600.0  # seconds after which a container that was created and never started counts as forgotten


def claim_gpus(engine: Engine, planned: NodePlan) -> None:
    """Claim all GPUs of this node's plan, whose container has been created. Raises GpuInUse with the run that has one.

    What was claimed before it raises goes with the run's containers. `launcher shell` claims none: it is for looking
    at things while a run goes on.
    """
    spec = planned.container
    if spec.labels[labels.PURPOSE] == "shell":
        return
    keep = (labels.RUN, labels.JOB, labels.OWNER, labels.CREATED, labels.VERSION)
    marks = {**{name: spec.labels[name] for name in keep}, labels.PURPOSE: "gpu"}
    for uuid in sorted(spec.gpus):  # in one order everywhere: of two runs that want the same GPUs one gets the first
        while (holder := engine.claim(f"launcher-gpu-{uuid}", spec.image, marks)) is not None:
            if holder.labels.get(labels.RUN) == marks[labels.RUN]:
                break
            if _alive(engine, holder):
                raise _in_use(engine, planned, uuid, holder.labels)
            engine.remove(holder.id)  # by its id: never a new claim of another run


def _alive(engine: Engine, holder: ContainerState) -> bool:
    """Whether the run with the claim has a container here that runs, or is about to."""
    run = holder.labels.get(labels.RUN)
    if run is None:
        return True  # not ours: another program's container of that name
    age = time.time() - float(holder.labels.get(labels.CREATED, "0") or 0)
    return any(
        not state.phase.ended and not (state.phase is Phase.CREATED and age > ABANDONED)
        for state in engine.list({labels.RUN: run, labels.PURPOSE: "run"})
    )


def _in_use(engine: Engine, planned: NodePlan, uuid: str, holder: Mapping[str, str]) -> GpuInUse:
    run, owner = holder.get(labels.RUN, "?"), holder.get(labels.OWNER, "?")
    return GpuInUse(
        f"node {planned.node}",
        f"GPU {uuid} is in use by the run {run} of {owner}",
        f"wait for it: --wait; choose others: gpus; or end that run: launcher down {run} --nodes {engine.host}",
    )
