"""Choose the rendezvous address: an address of the first node that every other node was able to reach.

Host names are never used: on many machines they resolve to 127.0.1.1. The order of the interfaces does not matter
either: docker0 has the same address on every node. `candidates` returns the addresses to test, the caller tests them,
and `choose` selects one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from launcher.errors import NodeUnfit
from launcher.model.facts import NodeFacts, Probe, Reach
from launcher.model.plan import Rendezvous

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
# Bridges and tunnels inside the machine: other machines cannot use their addresses, so they are tried last.
_INWARD = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lxc", "podman")


def candidates(facts: Sequence[NodeFacts], address: str | None = None) -> tuple[str, ...]:
    """Return the addresses of the first node to try from the other nodes, best first.

    `address`: address from the job file; then the only candidate. Addresses in a network that all nodes share come
    first, then others, bridges of the machine last. Loopback and link-local addresses are excluded.
    """
    if address:
        return (address,)
    master, *others = (_addresses(node) for node in facts)
    found: list[tuple[int, int, str]] = []
    for index, (interface, value) in enumerate(master):
        if value.is_loopback or value.is_link_local or value.version != 4:
            continue
        shared = all(any(a.network == value.network and a.ip != value.ip for _, a in other) for other in others)
        rank = 2 if interface.startswith(_INWARD) else (0 if shared else 1)
        found.append((rank, index, str(value.ip)))
    return tuple(ip for _, _, ip in sorted(found))


def choose(
    facts: Sequence[NodeFacts],
    probes: Sequence[Probe],
    port: int,
    addresses: Sequence[str | None] | None = None,
) -> Rendezvous:
    """Return the first candidate that every other node reaches, and each node's address and interface towards it.

    Raises NodeUnfit with the nodes that reach none of the master's addresses, and the tried addresses.
    """
    master, *others = facts
    given = tuple(addresses or [None] * len(facts))
    if not others and not given[0]:
        return on_one_machine(1, port)
    tried = candidates(facts, given[0])
    if not tried:
        raise NodeUnfit(
            f"node {master.name}",
            "has no IPv4 address that other machines could reach",
            "set one in the job file: nodes: [{host: " + master.host + ", address: 10.0.0.5}, ...]",
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
    ] or ["no address is reachable from all nodes: " + ", ".join(tried)]
    raise NodeUnfit(
        f"node {master.name}",
        "cannot be reached from " + "; ".join(lost),
        "open the rendezvous port and the ephemeral ports between the nodes, or set the right address: "
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
                f"has no interface with the address {address or '(no route to ' + ip + ')'}",
                "its addresses: " + ", ".join(str(a) for _, a in addresses),
            )
        names.append(name)
    return Rendezvous(ip, port, tuple(own), tuple(names), probed)


def source_address(node: NodeFacts, destination: str) -> str:
    """Return the node's source address for `destination`, by its routes (longest prefix, then metric); "" if none."""
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
    """Return the node's addresses, each with its interface."""
    return [(interface.name, ipaddress.ip_interface(a)) for interface in node.interfaces for a in interface.addresses]


def on_one_machine(nodes: int, port: int) -> Rendezvous:
    """Return the rendezvous of nodes that share one machine, on its loopback interface."""
    return Rendezvous(LOOPBACK, port, (LOOPBACK,) * nodes, (LOOPBACK_INTERFACE,) * nodes, probed=True)
