"""The rendezvous port of a run: the job's, else the first of a range that is free. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import InUse, NodesFailed
from launcher.job.models import Job
from launcher.model.facts import NodeFacts
from launcher.planning.checks import Check, Level, another_port, wait_or_stop


def choose(job: Job, facts: Sequence[NodeFacts]) -> int:
    """Return the first port that the job may use and that is free where it is needed. Raises NodesFailed."""
    found = [in_use(job, facts, port) for port in job.ports]
    for port, errors in zip(job.ports, found, strict=True):
        if not errors:
            return port
    if len(found) > 1:
        what = f"rendezvous ports {job.ports[0]} to {job.ports[-1]} are all in use"
        fix = f"wait for one: --wait; choose another: port; or stop a run: launcher runs --nodes {facts[0].host}"
        raise NodesFailed([InUse(f"node {facts[0].name}", what, fix)], of=len(facts))
    raise NodesFailed(found[0], of=len(facts))


def in_use(job: Job, facts: Sequence[NodeFacts], port: int) -> list[InUse]:
    """Return an error for each node that may be the master and whose rendezvous port is in use."""
    masters = facts if job.min_nodes else facts[:1]
    several = bool(job.min_nodes) and job.traits.one_machine  # each node has its own port
    found = [_held(node, port + rank * several) for rank, node in enumerate(masters)]
    return [error for error in found if error is not None]


def _held(node: NodeFacts, port: int) -> InUse | None:
    what, where = f"rendezvous port {port} is in use", f"node {node.name}"
    claim = next((claim for claim in node.port_claims if claim.port == port), None)
    if claim is not None:
        fix = wait_or_stop(claim.run, claim.hosts, another_port(port))
        return InUse(where, f"{what} by run {claim.run} of {claim.owner}", fix, (claim.run,))
    if port in node.listening:
        fix = f"stop the program that uses it, wait for its end: --wait, or {another_port(port)}"
        return InUse(where, f"{what}, and no run that is visible here claims it", fix)
    return None


def check(job: Job, facts: Sequence[NodeFacts]) -> Check:
    """Return doctor's check of the rendezvous port."""
    master = facts[0].name
    try:
        port = choose(job, facts)
    except NodesFailed as error:
        first = error.errors[0]
        return Check(first.where.removeprefix("node "), "port", Level.FAIL, first.what, first.next_step)
    taken = "" if port == job.ports[0] else f"; {in_use(job, facts, job.ports[0])[0].what}"
    return Check(master, "port", Level.OK, f"{port} is free for the rendezvous{taken}")
