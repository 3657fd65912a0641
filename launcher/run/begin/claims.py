"""Locks ("claims") on a node's GPUs and rendezvous ports: a container name that only one run at a time can hold.

A lock is valid while its run has a live container on the node. The next run that needs the resource removes a stale
lock, whose run has ended or has no container.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import replace

from launcher.errors import InUse, NodeUnfit
from launcher.model import labels
from launcher.model.container import Phase
from launcher.model.facts import GpuClaim, NodeFacts, PortClaim
from launcher.model.labels import RunLabels
from launcher.model.plan import NodePlan, Plan
from launcher.node.engine import Engine
from launcher.node.facts import listening
from launcher.planning.checks import another_port, wait_or_stop

ABANDONED = 600.0  # seconds after which a container that was created but never started counts as abandoned


def claim_all(engine: Engine, plan: Plan) -> None:
    """Lock the GPUs and the rendezvous port that the run needs on this node, after its container was created.

    The port needs a lock because nothing listens on it before the run starts. Locks taken before an error are removed
    with the run's containers. `launcher shell` takes none, so that it works next to a run. `doctor --bench` also locks
    the node, as two of them would measure each other's load. Raises InUse if another run holds a lock or a program
    listens on the port.
    """
    planned, port = plan.node_plan(engine.node), plan.rendezvous.port
    purpose = planned.container.labels[labels.PURPOSE]
    if purpose == "shell":
        return
    if purpose == "bench":
        _claim(engine, planned, "bench", "it is being measured", "measure other nodes")
    for uuid in sorted(planned.container.gpus):  # in a fixed order, so that two runs cannot block each other
        _claim(engine, planned, _name(uuid), f"GPU {uuid} is in use", "choose other GPUs: gpus")
    if plan.min_nodes and plan.traits.one_machine:
        port += planned.rank  # each node uses its own port
    listens = len(plan.nodes) > 1 or "--master_port" in planned.container.argv  # torchrun does so on a single node too
    if plan.min_nodes or (planned.rank == 0 and listens):
        what = f"rendezvous port {port} is"
        _claim(engine, planned, f"port-{port}", f"{what} locked", another_port(port))
        if plan.rendezvous.address and port in listening(engine.machine):  # a cluster's nodes are not known yet
            fix = f"stop the program that uses it, or {another_port(port)}"
            raise InUse(f"node {engine.node}", f"{what} in use, and no run that is visible here claims it", fix)


def claimed(engine: Engine) -> tuple[tuple[GpuClaim, ...], tuple[PortClaim, ...]]:
    """Return the GPUs and the ports of this node that runs have locked.

    Locks with invalid labels are left out: `up` reports them when it needs that GPU or port. Raises NodeUnreachable and
    other LauncherErrors.
    """
    gpus, ports, alive = list[GpuClaim](), list[PortClaim](), dict[str, str]()
    for state in engine.list({labels.PURPOSE: "claim"}):
        with suppress(ValueError):
            run = labels.read(state.labels)
            if run.run not in alive:
                alive[run.run] = _purpose(engine, run)
            if not alive[run.run]:
                continue
            if port := re.fullmatch(r"launcher-port-([0-9]{1,5})", state.name):
                hosts = run.hosts if alive[run.run] == "run" else ()
                ports.append(PortClaim(int(port[1]), run.run, run.owner, hosts))
            age = max(0.0, time.time() - run.created)
            gpus += [
                GpuClaim(uuid, run.run, run.owner, age, run.group.shown if run.group else "")
                for uuid in run.gpus
                if state.name == f"launcher-{_name(uuid)}"
            ]
    return tuple(gpus), tuple(ports)


def with_claims(engine: Engine, *, gpus: bool = True, port: bool = False) -> NodeFacts:
    """Return the node's facts with the GPUs and the ports that runs have locked.

    gpus, port: what the caller needs. Raises NodeUnreachable, NodeUnfit, ...
    """
    node = engine.facts()
    if not port and not (gpus and node.gpus):
        return node
    of_gpus, of_ports = claimed(engine)
    return replace(node, claims=of_gpus if gpus else (), port_claims=of_ports)


def _name(uuid: str) -> str:
    """Return the name of a GPU's lock; old drivers write a MIG instance's UUID as MIG-GPU-<uuid>/<GI>/<CI>."""
    return f"gpu-{uuid.replace('/', '-')}"


def _claim(engine: Engine, planned: NodePlan, name: str, what: str, other: str) -> None:
    """Take a lock. Raises InUse, with the text `what` and the alternative `other`; NodeUnfit."""
    spec = planned.container
    marks = {**spec.labels, labels.PURPOSE: "claim"}
    while (holder := engine.claim(f"launcher-{name}", spec.image, marks)) is not None:
        try:
            held = labels.read(holder.labels)
        except ValueError as wrong:
            what = f"container {holder.name} is named like a lock but lacks its labels ({wrong})"
            raise NodeUnfit(f"node {planned.node}", what, f"docker rm -f {holder.name}") from wrong
        if held.run == spec.labels[labels.RUN]:
            return
        if purpose := _purpose(engine, held):
            if purpose == "bench":
                who, fix = f"`doctor --bench` of {held.owner}", f"wait until it has ended; or {other}"
            else:
                who, fix = f"run {held.run} of {held.owner}", wait_or_stop(held.run, held.hosts, other)
            raise InUse(f"node {planned.node}", f"{what} by {who}", fix, (held.run,))
        engine.remove(holder.id)  # by ID, so that a new lock of another run is never removed


def _purpose(engine: Engine, held: RunLabels) -> str:
    """Return the purpose of the run that holds the lock: run or bench; "" if it has no container on this node that is
    running or about to start."""
    age = time.time() - held.created
    live = [
        state.labels.get(labels.PURPOSE, "run")
        for state in engine.list({labels.RUN: held.run, labels.NODE: None})  # a machine can have several nodes
        if not state.phase.ended and not (state.phase is Phase.CREATED and age > ABANDONED)
    ]
    return next((purpose for purpose in live if purpose != "claim"), "")
