"""Where the ranks meet: an address of the first node that every other node was seen to reach.

Host names are never used (they resolve to 127.0.1.1 on half the machines), and being the first is no reason to choose
an address: docker0 has the same one on every node. `candidates` says which to test, the caller tests them, `choose`
decides.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from launcher.errors import NodeUnfit
from launcher.model.facts import NodeFacts, Probe, Reach
from launcher.model.plan import Rendezvous

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
# Bridges and tunnels of the machine itself: their addresses mean nothing to another machine, so they are tried last.
_INWARD = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lxc", "podman")


def candidates(facts: Sequence[NodeFacts], address: str | None = None) -> tuple[str, ...]:
    """Addresses of the first node worth trying from the others, best first.

    `address`: the one that the job file names; then it alone. Addresses in a network that every node has come first,
    then the rest, the machine's own bridges last. Loopback and link-local addresses never.
    """
    if address:
        return (address,)
    master, *others = (_addresses(node) for node in facts)
    found: list[tuple[int, int, str]] = []
    for place, (interface, value) in enumerate(master):
        if value.is_loopback or value.is_link_local or value.version != 4:
            continue
        shared = all(any(a.network == value.network and a.ip != value.ip for _, a in other) for other in others)
        rank = 2 if interface.startswith(_INWARD) else (0 if shared else 1)
        found.append((rank, place, str(value.ip)))
    return tuple(ip for _, _, ip in sorted(found))


def choose(
    facts: Sequence[NodeFacts],
    probes: Sequence[Probe],
    port: int,
    addresses: Sequence[str | None] | None = None,
) -> Rendezvous:
    """The first candidate that every other node reaches; each node's own address and interface towards it.

    Raises NodeUnfit, naming the nodes that reach none of the master's addresses and what was tried.
    """
    master, *others = facts
    given = tuple(addresses or [None] * len(facts))
    if not others and not given[0]:
        return on_one_machine(1, port)
    tried = candidates(facts, given[0])
    if not tried:
        raise NodeUnfit(
            f"node {master.name}",
            "has no IPv4 address that another machine could reach",
            "name one in the job file: nodes: [{host: " + master.host + ", address: 10.0.0.5}, ...]",
        )
    known = {(p.source, p.address): p.reach for p in probes if p.target == master.name}
    reach = {ip: {other.name: known.get((other.name, ip), Reach.UNKNOWN) for other in others} for ip in tried}
    for probed in (True, False):
        for ip, seen in reach.items():
            if all(r.reached or (r is Reach.UNKNOWN and not probed) for r in seen.values()):
                return _settle(facts, given, ip, port, probed=probed)
    lost = [
        f"{other.name} ({', '.join(f'{ip} {seen[other.name].value}' for ip, seen in reach.items())})"
        for other in others
        if not any(seen[other.name].reached for seen in reach.values())
    ] or ["no single address is reached by all: " + ", ".join(tried)]
    raise NodeUnfit(
        f"node {master.name}",
        "cannot be reached from " + "; ".join(lost),
        "open the rendezvous port and the ephemeral ports between the nodes, or name the right address: "
        "nodes: [{host: ..., address: ...}]",
    )


def _settle(facts: Sequence[NodeFacts], given: Sequence[str | None], ip: str, port: int, *, probed: bool) -> Rendezvous:
    own = [ip] + [given[i] or source_address(node, ip) for i, node in enumerate(facts) if i > 0]
    names = []
    for node, address in zip(facts, own, strict=True):
        addresses = _addresses(node)
        name = next((name for name, a in addresses if str(a.ip) == address), None)
        if name is None:
            raise NodeUnfit(
                f"node {node.name}",
                f"has no interface with the address {address or '(none leads to ' + ip + ')'}",
                "its addresses: " + ", ".join(str(a) for _, a in addresses),
            )
        names.append(name)
    return Rendezvous(ip, port, tuple(own), tuple(names), probed)


def source_address(node: NodeFacts, destination: str) -> str:
    """The node's own address for reaching `destination`, by its routes (longest prefix, then metric); "" if none."""
    target, addresses = ipaddress.ip_address(destination), _addresses(node)
    if any(a.ip == target for _, a in addresses):
        return destination
    matching = [
        (-network.prefixlen, route.metric, route.interface)
        for route in node.routes
        if (network := ipaddress.ip_network(route.destination, strict=False)).version == target.version
        and target in network
    ]
    for _, _, name in sorted(matching):
        of_interface = [a for i, a in addresses if i == name]
        inside = [a for a in of_interface if target in a.network] or [a for a in of_interface if a.version == 4]
        if inside:
            return str(inside[0].ip)
    return ""


def _addresses(node: NodeFacts) -> list[tuple[str, ipaddress.IPv4Interface | ipaddress.IPv6Interface]]:
    """With the interface of each."""
    return [(interface.name, ipaddress.ip_interface(a)) for interface in node.interfaces for a in interface.addresses]


def on_one_machine(nodes: int, port: int) -> Rendezvous:
    """Several nodes of a job on one machine meet on its loopback interface."""
    return Rendezvous(LOOPBACK, port, (LOOPBACK,) * nodes, (LOOPBACK_INTERFACE,) * nodes, probed=True)
