"""Find an address of the master that all other nodes can reach, before a run starts and without installing anything.

A command on each node connects to the rendezvous port, on which nothing listens yet: "refused" shows that no firewall
blocks the port, a timeout that one does. To verify that an address belongs to the master and not to another machine, a
few nodes read the host key at that address through their sshd. Only a few, because sshd drops connections if more than
ten are being authenticated concurrently (MaxStartups). If sshd forbids forwarding, the address is not verified. An
address that a node has itself is never the master's.
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
VERIFIERS = 6  # nodes that verify the master's host key


def probe_master(fleet: Fleet, facts: Sequence[NodeFacts], port: int, address: str | None) -> list[Probe]:
    """Try the master's addresses from every other node, best first, until all reach one; return all results.

    `address`: the address in the job file; if set, only this one is tried. Raises NodesFailed.
    """
    master, *others = fleet.engines
    if not others:
        return []
    ssh_port = facts[0].ssh_port
    verifiers = {engine.node for engine in others[:: -(-len(others) // VERIFIERS)]} if ssh_port else set()
    by_name = {node.name: node for node in facts}
    probes: list[Probe] = []
    for ip in candidates(facts, address):

        def probe(engine: Engine, ip: str = ip) -> Reach:
            if engine is master:
                return Reach.OPEN
            if source_address(by_name[engine.node], ip) == ip:
                return Reach.OTHER  # the node's own address
            if engine.node not in verifiers:
                return engine.machine.reach(ip, port, TIMEOUT)
            return reach_node(engine.machine, master.machine, ip, port, ssh_port)

        seen = fleet.each(probe)[1:]
        probes += [Probe(other.node, master.node, ip, port, reach) for other, reach in zip(others, seen, strict=True)]
        if all(reach.reached for reach in seen):
            break
    return probes


def reach_node(source: Machine, target: Machine, address: str, port: int, ssh_port: int) -> Reach:
    """Try a port of another node; return OTHER if the sshd at that address has a different host key than the node."""
    key = target.host_key()
    if key is None:
        return source.reach(address, port, TIMEOUT)
    reached, verified = run_both(
        lambda: source.reach(address, port, TIMEOUT),
        lambda: source.has_host_key(address, ssh_port, key, TIMEOUT),
    )
    return Reach.OTHER if verified is False else reached
