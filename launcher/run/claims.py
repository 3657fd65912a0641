"""Which run has which GPU, and which port of a master: a claim each, a name that the node gives to one run only.

The claim follows the run's own container, so that a claim without a container is one whose owner is gone: the
next run that wants the same removes it. A run that has ended holds nothing either.
"""

from __future__ import annotations

import time
from contextlib import suppress

from launcher.errors import InUse, NodeUnfit
from launcher.model import labels
from launcher.model.container import Phase
from launcher.model.facts import GpuClaim
from launcher.model.labels import RunLabels
from launcher.model.plan import NodePlan, Plan
from launcher.node.engine import Engine

ABANDONED = 600.0  # seconds after which a container that was created and never started counts as forgotten


def claim_all(engine: Engine, plan: Plan) -> None:
    """Claim what the run needs of this node, where its container has been created: its GPUs, and the port where nodes
    meet, as nothing listens there before it has started. Raises InUse with the run that has one.

    What was claimed before it raises goes with the run's containers. `launcher shell` claims none: it is for looking
    at things while a run goes on.
    """
    planned, port = plan.on(engine.node), plan.rendezvous.port
    if planned.container.labels[labels.PURPOSE] == "shell":
        return
    for uuid in sorted(planned.container.gpus):  # in one order everywhere: of two runs one gets the first
        _claim(engine, planned, _name(uuid), f"GPU {uuid} is in use", "choose others: gpus")
    if plan.min_nodes and plan.runtime == "process":
        port += planned.rank  # on one machine, each node has a port of its own
    if plan.min_nodes or (planned.rank == 0 and len(plan.nodes) > 1):
        what = f"port {port}, where the ranks would meet, is claimed"
        _claim(engine, planned, f"port-{port}", what, f"choose another: --set port={port + 1}")


def claimed_gpus(engine: Engine) -> tuple[GpuClaim, ...]:
    """The GPUs of this node that runs have. Raises NodeUnreachable and the like."""
    found, alive = [], dict[str, bool]()
    for state in engine.list({labels.PURPOSE: "claim"}):
        with suppress(ValueError):  # no labels of ours: `up` names it when it wants that GPU
            run = labels.read(state.labels)
            for uuid in run.gpus:
                if state.name != f"launcher-{_name(uuid)}":  # the claim of another one, or of a port
                    continue
                if run.run not in alive:
                    alive[run.run] = _alive(engine, run)
                if alive[run.run]:
                    found.append(GpuClaim(uuid, run.run, run.owner, max(0.0, time.time() - run.created)))
    return tuple(found)


def _name(uuid: str) -> str:
    """Of the claim of a GPU; an old driver writes an instance's UUID as MIG-GPU-<uuid>/<GI>/<CI>."""
    return f"gpu-{uuid.replace('/', '-')}"


def _claim(engine: Engine, planned: NodePlan, name: str, what: str, other: str) -> None:
    """Raises InUse, of what and with what other choice there is; NodeUnfit."""
    spec = planned.container
    marks = {**spec.labels, labels.PURPOSE: "claim"}
    while (holder := engine.claim(f"launcher-{name}", spec.image, marks)) is not None:
        try:
            held = labels.read(holder.labels)
        except ValueError as error:
            what = f"the container {holder.name} has the name of a claim and not a claim's labels ({error})"
            raise NodeUnfit(f"node {planned.node}", what, f"docker rm -f {holder.name}") from error
        if held.run == spec.labels[labels.RUN]:
            return
        if _alive(engine, held):
            fix = f"wait for it: --wait; {other}; or end that run: launcher down {held.run} --nodes {engine.host}"
            raise InUse(f"node {planned.node}", f"{what} by the run {held.run} of {held.owner}", fix)
        engine.remove(holder.id)  # by its id: never a new claim of another run


def _alive(engine: Engine, held: RunLabels) -> bool:
    """Whether the run with the claim has a container here that runs, or is about to."""
    age = time.time() - held.created
    return any(
        not state.phase.ended and not (state.phase is Phase.CREATED and age > ABANDONED)
        for state in engine.list({labels.RUN: held.run, labels.NODE: None})  # on a machine with several, any node
        if state.labels.get(labels.PURPOSE) != "claim"
    )
