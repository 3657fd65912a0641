"""Which address of the master every other node reaches, tried before anything starts: nothing is installed for it.

A command on each node connects to the rendezvous port, where nothing listens yet: "refused" proves that no firewall
stands between, silence that one does. Through the node's sshd the master's sshd is asked for its host key, which proves
that the address is the master's and not another machine's. A few nodes prove that for all, since an sshd drops
connections where more than ten are being made at once (MaxStartups); where sshd forwards no connections, nothing is
proven. An address that a node has itself, as docker0's, needs no proof.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.model.facts import NodeFacts, Probe, Reach
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.machine import Machine
from launcher.node.parallel import run_both
from launcher.planning.rendezvous import candidates, source_address

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
            return reach_node(engine.machine, master.machine, ip, port, ssh_port)

        seen = fleet.each(probe)[1:]
        probes += [Probe(other.node, master.node, ip, port, reach) for other, reach in zip(others, seen, strict=True)]
        if all(reach.reached for reach in seen):
            break
    return probes


def reach_node(source: Machine, target: Machine, address: str, port: int, ssh_port: int) -> Reach:
    """Try a port of another node; OTHER where the sshd at that address has another host key than the node."""
    key = target.host_key()
    if key is None:
        return source.reach(address, port, TIMEOUT)
    reached, proven = run_both(
        lambda: source.reach(address, port, TIMEOUT),
        lambda: source.has_host_key(address, ssh_port, key, TIMEOUT),
    )
    return Reach.OTHER if proven is False else reached
