"""Which run has which GPU: one claim a GPU on its node, a name that the node gives to one run only.

The claim follows the run's own container, so that a claim without a container is one whose owner is gone: the
next run that wants the GPU removes it. A run that has ended holds nothing either.
"""

from __future__ import annotations

import time

from launcher.errors import GpuInUse, NodeUnfit
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.labels import RunLabels
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
    marks = {**spec.labels, labels.PURPOSE: "gpu"}
    for uuid in sorted(spec.gpus):  # in one order everywhere: of two runs that want the same GPUs one gets the first
        while (holder := engine.claim(f"launcher-gpu-{uuid}", spec.image, marks)) is not None:
            held = _claim(planned, uuid, holder)
            if held.run == spec.labels[labels.RUN]:
                break
            if _alive(engine, held):
                raise _in_use(engine, planned, uuid, held)
            engine.remove(holder.id)  # by its id: never a new claim of another run


def _claim(planned: NodePlan, uuid: str, holder: ContainerState) -> RunLabels:
    try:
        return labels.read(holder.labels)
    except ValueError as error:
        what = f"GPU {uuid}: the container {holder.name} has the name of its claim and not a claim's labels ({error})"
        raise NodeUnfit(f"node {planned.node}", what, f"docker rm -f {holder.name}") from error


def _alive(engine: Engine, held: RunLabels) -> bool:
    """Whether the run with the claim has a container here that runs, or is about to."""
    age = time.time() - held.created
    return any(
        not state.phase.ended and not (state.phase is Phase.CREATED and age > ABANDONED)
        for state in engine.list({labels.RUN: held.run, labels.PURPOSE: "run"})
    )


def _in_use(engine: Engine, planned: NodePlan, uuid: str, held: RunLabels) -> GpuInUse:
    return GpuInUse(
        f"node {planned.node}",
        f"GPU {uuid} is in use by the run {held.run} of {held.owner}",
        f"wait for it: --wait; choose others: gpus; or end that run: launcher down {held.run} --nodes {engine.host}",
    )
