"""Trying the ways between the nodes before anything is started: through their own sshd, with nothing installed on them.

A node's sshd opens a TCP connection for us. To the master's sshd: its host key proves that the address is the master's
and not another machine's (docker0 has the same address everywhere). To the rendezvous port, where nobody listens yet:
"refused" proves that no firewall stands between, silence that one does.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.model.facts import NodeFacts, Probe, Reach
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.plan.rendezvous import candidates

TIMEOUT = 3.0
_GOOD = (Reach.OPEN, Reach.REFUSED)


def try_ways(fleet: Fleet, facts: Sequence[NodeFacts], port: int, address: str | None) -> list[Probe]:
    """Try the master's addresses from every other node, best first, until one is reached by all; what was seen.

    `address`: the one that the job file names, then it alone.
    """
    master, *others = fleet.engines
    probes: list[Probe] = []
    if not others:
        return probes
    for ip in candidates(facts, address):

        def try_one(engine: Engine, ip: str = ip) -> Reach:
            return Reach.OPEN if engine is master else _reach(engine, master, ip, port)

        seen = fleet.each(try_one)[1:]
        probes += [Probe(other.node, master.node, ip, port, reach) for other, reach in zip(others, seen, strict=True)]
        if all(reach in _GOOD for reach in seen):
            break
    return probes


def _reach(engine: Engine, master: Engine, ip: str, port: int) -> Reach:
    """Whether `ip` is the master's, and whether its rendezvous port can be reached there."""
    key, ssh = master.host_key(), master.ssh_port()
    if key is not None and ssh is not None:
        identity = engine.reach(ip, ssh, TIMEOUT, expect=key)
        if identity in (Reach.OTHER, Reach.UNKNOWN):
            return identity
    return engine.reach(ip, port, TIMEOUT)
