"""Which run has which GPU, and which port of a master: a claim each, a name that the node gives to one run only.

The claim follows the run's own container, so that a claim without a container is one whose owner is gone: the
next run that wants the same removes it. A run that has ended holds nothing either.
"""

from __future__ import annotations

import time

from launcher.errors import InUse, NodeUnfit
from launcher.model import labels
from launcher.model.container import Phase
from launcher.model.labels import RunLabels
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
            raise _in_use(engine, planned, holder, f"GPU {uuid} is in use", "choose others: gpus")


def claim_port(engine: Engine, planned: NodePlan, port: int) -> None:
    """Claim the port where the nodes of a run will meet, on its master: nothing listens there before it has started.

    Raises InUse with the run that has it.
    """
    if holder := _claim(engine, planned, f"port-{port}"):
        what = f"port {port}, where the ranks would meet, is claimed"
        raise _in_use(engine, planned, holder, what, f"choose another: --set port={port + 1}")


def _claim(engine: Engine, planned: NodePlan, name: str) -> RunLabels | None:
    """None: this run has it now; else what the claim says that has it. Raises NodeUnfit."""
    spec = planned.container
    marks = {**spec.labels, labels.PURPOSE: "claim"}
    while (holder := engine.claim(f"launcher-{name}", spec.image, marks)) is not None:
        try:
            held = labels.read(holder.labels)
        except ValueError as error:
            what = f"the container {holder.name} has the name of a claim and not a claim's labels ({error})"
            raise NodeUnfit(f"node {planned.node}", what, f"docker rm -f {holder.name}") from error
        if held.run == spec.labels[labels.RUN]:
            return None
        if _alive(engine, held):
            return held
        engine.remove(holder.id)  # by its id: never a new claim of another run
    return None


def _alive(engine: Engine, held: RunLabels) -> bool:
    """Whether the run with the claim has a container here that runs, or is about to."""
    age = time.time() - held.created
    return any(
        not state.phase.ended and not (state.phase is Phase.CREATED and age > ABANDONED)
        for state in engine.list({labels.RUN: held.run})
        if state.labels.get(labels.PURPOSE) != "claim"
    )


def _in_use(engine: Engine, planned: NodePlan, held: RunLabels, what: str, other: str) -> InUse:
    return InUse(
        f"node {planned.node}",
        f"{what} by the run {held.run} of {held.owner}",
        f"wait for it: --wait; {other}; or end that run: launcher down {held.run} --nodes {engine.host}",
    )
