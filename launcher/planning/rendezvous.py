"""Choose the rendezvous address: an address of the first node that every other node was able to reach.

Host names are never used: on many machines they resolve to 127.0.1.1. Nor are the addresses of Docker's bridges, which
are the same on many machines. `candidates` returns the addresses to test, the caller tests them,
and `choose` selects one.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence

from launcher.errors import NodeUnfit
from launcher.model.facts import NodeFacts, Probe, Reach
from launcher.model.plan import Rendezvous

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
_NO_LO = "move the address to a dummy interface (ip link add dummy0 type dummy), or give a network interface one"
# Tunnels to other machines, which are slower than the network below them.
_TUNNELS = ("wg", "tailscale", "tun", "zt", "ppp")
# Networks of containers, and bridges of unknown use: tried last.
_INWARD = ("br-", "cni", "flannel", "cali")
# Bridges inside the machine: never tried, as another machine with the same address may answer there.
_BRIDGES = re.compile("docker|br-[0-9a-f]{12}$|veth|virbr|lxc|podman")


def candidates(facts: Sequence[NodeFacts], address: str | None = None) -> tuple[str, ...]:
    """Return the addresses of the first node to try from the other nodes, best first.

    `address`: address from the job file; then the only candidate. Addresses in a network that all nodes share come
    first, then others, then those of the loopback interface (known to routers by BGP), of tunnels, and of networks of
    containers. Loopback and link-local addresses, and those of the machine's own bridges (docker0), are excluded.
    """
    if address:
        return (address,)
    master, *others = (_addresses(node) for node in facts)
    found: list[tuple[int, int, str]] = []
    for index, (interface, value) in enumerate(master):
        if not _is_usable(interface, value) or value.version != 4:
            continue
        shared = all(any(a.network == value.network and a.ip != value.ip for _, a in other) for other in others)
        found.append((_preference(interface, shared=shared), index, str(value.ip)))
    return tuple(ip for _, _, ip in sorted(found))


def _is_usable(interface: str, address: ipaddress.IPv4Interface | ipaddress.IPv6Interface) -> bool:
    """Whether other machines may reach this address."""
    return not (address.is_loopback or address.is_link_local or _BRIDGES.match(interface))


def _preference(interface: str, *, shared: bool) -> int:
    """Return the place of an interface in the order of candidates(). shared: its network is that of all nodes."""
    if interface.startswith(_INWARD):
        return 4
    if is_tunnel(interface):
        return 3
    if interface == LOOPBACK_INTERFACE:
        return 2
    return 0 if shared else 1


def is_tunnel(interface: str) -> bool:
    """Whether it leads to other machines through a VPN or a dial-up connection."""
    return interface.startswith(_TUNNELS)


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
        usable = [str(a.ip) for interface, a in _addresses(master) if _is_usable(interface, a)]
        raise NodeUnfit(
            f"node {master.name}",
            "has no IPv4 address that other machines could reach",
            f"set one in the job file: nodes: [{{host: {master.host}, address: {next(iter(usable), 'ADDRESS')}}}, ...]",
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
        f"open TCP {port} and the ephemeral ports between the nodes, or set the right address: "
        "nodes: [{host: ..., address: ...}]",
    )


def _settle(facts: Sequence[NodeFacts], given: Sequence[str | None], ip: str, port: int, *, probed: bool) -> Rendezvous:
    own = [ip] + [given[i] or source_address(node, ip) for i, node in enumerate(facts) if i > 0]
    names = []
    for rank, (node, address) in enumerate(zip(facts, own, strict=True)):
        addresses = _addresses(node)
        holders = [name for name, a in addresses if str(a.ip) == address]
        name = next((name for name in holders if name != LOOPBACK_INTERFACE), None)
        if holders and name is None:  # gloo and NCCL would use 127.0.0.1
            name = _outgoing(node, ip if rank else own[-1] or ip)
            if name is None:
                what = f"has its address {address} on lo, which gloo and NCCL cannot use, and no other one towards {ip}"
                raise NodeUnfit(f"node {node.name}", what, _NO_LO)
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
    target = ipaddress.ip_address(destination)
    if any(a.ip == target for _, a in _addresses(node)):
        return destination
    return next((address for _, address in _ways(node, destination)), "")


def _outgoing(node: NodeFacts, destination: str) -> str | None:
    return next((name for name, _ in _ways(node, destination) if name != LOOPBACK_INTERFACE), None)


def _ways(node: NodeFacts, destination: str) -> Iterator[tuple[str, str]]:
    """Yield interfaces that lead to the destination, each with its address, in the order of the node's routes."""
    target, addresses = ipaddress.ip_address(destination), _addresses(node)
    matching = [
        (-network.prefixlen, route.metric, route.interface)
        for route in node.routes
        if (network := ipaddress.ip_network(route.destination, strict=False)).version == target.version
        and target in network
    ]
    for _, _, name in sorted(matching):
        own = [a for i, a in addresses if i == name and a.version == target.version]
        inside = [a for a in own if target in a.network] or [a for a in own if not a.is_link_local]
        if inside:
            yield name, str(inside[0].ip)


def _addresses(node: NodeFacts) -> list[tuple[str, ipaddress.IPv4Interface | ipaddress.IPv6Interface]]:
    """Return the node's addresses, each with its interface."""
    return [(interface.name, ipaddress.ip_interface(a)) for interface in node.interfaces for a in interface.addresses]


def on_one_machine(nodes: int, port: int) -> Rendezvous:
    """Return the rendezvous of nodes that share one machine, on its loopback interface."""
    return Rendezvous(LOOPBACK, port, (LOOPBACK,) * nodes, (LOOPBACK_INTERFACE,) * nodes, probed=True)
