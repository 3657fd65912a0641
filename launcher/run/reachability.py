"""Which address of the master every other node reaches, tried before anything starts: nothing is installed for it.

A node's sshd opens a TCP connection for us. To the rendezvous port, where nothing listens yet: "refused" proves that no
firewall stands between, silence that one does. To the master's sshd: its host key proves that the address is the
master's and not another machine's. A few nodes prove that for all, since an sshd drops connections where more than ten
are being made at once (MaxStartups); an address that a node has itself, as docker0's, needs no proof.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.model.facts import NodeFacts, Probe, Reach
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import run_both
from launcher.plan.rendezvous import candidates, source_address

TIMEOUT = 3.0
PROVERS = 6


def probe_master(fleet: Fleet, facts: Sequence[NodeFacts], port: int, address: str | None) -> list[Probe]:
    """Try the master's addresses from every other node, best first, until all reach one; what came of each try.

    `address`: the one that the job file names; then it alone. Raises NodesFailed.
    """
    master, *others = fleet.engines
    if not others:
        return []
    ssh_port = facts[0].ssh_port
    provers = {engine.node for engine in others[:: -(-len(others) // PROVERS)]} if ssh_port else set()
    by_name = {node.name: node for node in facts}
    probes: list[Probe] = []
    for ip in candidates(facts, address):

        def probe(engine: Engine, ip: str = ip) -> Reach:
            if engine is master:
                return Reach.OPEN
            if source_address(by_name[engine.node], ip) == ip:
                return Reach.OTHER  # its own
            if engine.node not in provers:
                return engine.machine.reach(ip, port, TIMEOUT)
            reached, proof = run_both(
                lambda: engine.machine.reach(ip, port, TIMEOUT),
                lambda: engine.machine.reach(ip, ssh_port, TIMEOUT, expect=master.machine.host_key()),
            )
            return proof if proof is Reach.OTHER else reached

        seen = fleet.each(probe)[1:]
        probes += [Probe(other.node, master.node, ip, port, reach) for other, reach in zip(others, seen, strict=True)]
        if all(reach.reached for reach in seen):
            break
    return probes
