"""The RDMA ports of nodes (InfiniBand, RoCE): what is wrong with them, and those that NCCL is told to use. Pure.

NCCL uses every active port. That fails if a RoCE port has no address, and mixes InfiniBand with RoCE. Before version
2.21 it also takes the first address of a RoCE port, which is link-local and not routed. Only ConnectX cards are chosen.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.faults.transport import shortened
from launcher.model.facts import NodeFacts
from launcher.model.rdma import Port
from launcher.planning.checks import Check, Level

_NAME = "infiniband"
_WITHOUT_GPUDIRECT = re.compile("GeForce|TITAN")  # docs.nvidia.com/cuda/gpudirect-rdma: data center and Quadro only
_OFF = "NCCL_IB_DISABLE"
_FINDS_ADDRESSES = (2, 5)  # torch with NCCL 2.21


@dataclass(frozen=True)
class Setting:
    """A variable that NCCL gets on a node."""

    name: str
    value: str
    why: str


def choose(facts: Sequence[NodeFacts], torch: str) -> list[list[Setting]]:
    """Return the settings of each node, none where NCCL's own choice is right.

    torch: the version in the image; "": none, so that NCCL's version is unknown.
    """
    ports_of = [_usable(node) for node in facts]
    if not all(ports_of):  # a node without: NCCL uses TCP
        return [[] for _ in facts]
    links = set.intersection(*({port.ethernet for port in ports} for ports in ports_of)) if ports_of else set()
    if not links:
        return [[Setting(_OFF, "1", f"{_apart(facts)}, which do not reach each other")] for _ in facts]
    ethernet = False not in links
    return [[*_settings(node, ports, torch, ethernet)] for node, ports in zip(facts, ports_of, strict=True)]


def usable(node: NodeFacts, settings: Sequence[Setting]) -> tuple[str, ...]:
    """Return the node's RDMA devices with a link; none if the settings of `choose` switch them off."""
    if any(setting.name == _OFF for setting in settings):
        return ()
    return tuple(dict.fromkeys(port.device for port in node.rdma if port.active and (port.rdma or port.efa)))


def _apart(facts: Sequence[NodeFacts]) -> str:
    """Return "gpu-a has InfiniBand, gpu-b RoCE" if the usable ports of the nodes have no kind in common, else ""."""
    kinds = {node.name: {port.ethernet for port in _usable(node)} for node in facts}
    if not all(kinds.values()) or len(kinds) < 2 or set.intersection(*kinds.values()):
        return ""
    infiniband, roce = (next(name for name, own in kinds.items() if own == {ethernet}) for ethernet in (False, True))
    return f"{infiniband} has InfiniBand, {roce} RoCE"


def _usable(node: NodeFacts) -> list[Port]:
    """Return the ports of ConnectX cards that can send; [] if the node has others too, or containers get none."""
    active = _active(node)
    if not node.infiniband or not all(port.connectx for port in active):
        return []
    return [port for port in active if port.addresses or not port.ethernet]


def _active(node: NodeFacts) -> list[Port]:
    return [port for port in node.rdma if port.active and port.rdma]


def _settings(node: NodeFacts, usable: Sequence[Port], torch: str, ethernet: bool) -> Iterator[Setting]:
    """ethernet: RoCE, rather than InfiniBand, is what all nodes have."""
    wanted = [port for port in usable if port.ethernet == ethernet]
    if left := [_named(port) for port in _active(node) if port not in wanted]:
        value = "=" + ",".join(map(_named, wanted))
        kind = "RoCE with an address" if ethernet else "InfiniBand"
        yield Setting("NCCL_IB_HCA", value, f"not {shortened(left)}: NCCL would use it too, and all nodes have {kind}")
    version = re.match(r"(\d{1,3})\.(\d{1,3})", torch)
    old = version is not None and (int(version[1]), int(version[2])) < _FINDS_ADDRESSES
    common = set.intersection(*({gid.index for gid in port.addresses} for port in wanted))
    if ethernet and old and common:
        why = f"its RoCE v2 address; the NCCL of torch {torch} takes 0, which is not routed"
        yield Setting("NCCL_IB_GID_INDEX", str(min(common)), why)


def _named(port: Port) -> str:
    return f"{port.device}:{port.number}"  # as in NCCL_IB_HCA


def without_gpudirect(node: NodeFacts) -> bool:
    """Whether no card can read the memory of the node's GPUs."""
    return bool(node.gpus) and all(gpu.shared or _WITHOUT_GPUDIRECT.search(gpu.name) for gpu in node.gpus)


def of_node(node: NodeFacts) -> Iterator[Check]:
    """Yield a warning for each problem, with its fix."""
    active = _active(node)
    cards = {port.card for port in active}
    for what, fix in (found for port in node.rdma if port.rdma for found in _of_port(port, node.rdma, cards)):
        yield Check(node.name, _NAME, Level.WARN, what, fix)
    if active and not node.infiniband:
        rootless = node.engine is not None and node.engine.rootless
        fix = "sudo modprobe ib_uverbs" + ("; its files must be open to the user of the rootless engine" * rootless)
        what = f"{active[0].device} is active, but there is no /dev/infiniband: NCCL would use TCP"
        yield Check(node.name, _NAME, Level.WARN, what, fix)
    loaded = node.peermem or node.dmabuf
    if any(port.connectx for port in active) and node.gpus and not loaded and not without_gpudirect(node):
        what = "nvidia_peermem is not loaded, and the driver has no DMA-BUF: gradients are copied through host memory"
        yield Check(node.name, _NAME, Level.WARN, what, "sudo modprobe nvidia_peermem")


def _of_port(port: Port, every: Sequence[Port], cards: set[str]) -> Iterator[tuple[str, str]]:
    where = f"{port.device} ({port.interface})" if port.interface else port.device
    interface = port.interface or "INTERFACE"
    if port.virtual or not port.state:
        return
    if port.physical == "LinkUp" and not port.active:
        fix = "start the subnet manager: opensm, or that of the switch; for a virtual function, set its GUID"
        yield f"{where} has a link, but no subnet manager has configured it ({port.state})", fix
    elif not port.active:
        if port.card not in cards and (port.physical != "Disabled" or not cards):
            fix = "check its cable and the port at the other end; ibstat shows its state"
            if port.ethernet and port.physical == "Disabled":
                fix = f"sudo ip link set dev {interface} up; {fix}"
            yield f"{where} is down ({port.physical or port.state})", fix
    elif port.ethernet and port.gids is not None and "RoCE v2" not in port.gids:
        fix = "give its interface an address; v1 alone (ConnectX-3) reaches only its own Ethernet segment"
        yield f"{where} has no RoCE v2 GID", fix
    elif port.ethernet and port.gids and not port.addresses:
        twins = [other.device for other in every if other.card == port.card and other.addresses and other.active]
        beside = f", and its twin {twins[0]} has one: half of the card's bandwidth is unused" if twins else ""
        fix = f"sudo ip addr add ADDRESS/24 dev {interface}, in a network of its own; persist it"
        yield f"{where} has no IPv4 address{beside}", fix


def between(nodes: Sequence[NodeFacts]) -> Iterator[Check]:
    """Yield a warning if the nodes have no kind of RDMA in common, and for each network of RoCE ports whose interfaces
    have different MTUs.
    """
    if apart := _apart(nodes):
        what = f"{apart}: NCCL cannot connect them, so `up` makes it use TCP ({_OFF}: 1)"
        fix = "use nodes of one kind, or change the ports' LINK_TYPE with mlxconfig, if the switch supports it"
        yield Check("all", _NAME, Level.WARN, what, fix)
    seen: dict[str, dict[int, list[str]]] = {}
    for node in nodes:
        names = {gid.interface for port in _active(node) for gid in port.addresses}
        for interface in (each for each in node.interfaces if each.name in names and each.mtu):
            for address in (text for text in interface.addresses if ":" not in text):
                network = str(ipaddress.ip_interface(address).network)
                seen.setdefault(network, {}).setdefault(interface.mtu, []).append(f"{node.name} {interface.name}")
    for network, sizes in seen.items():
        if len(sizes) > 1:
            each = "; ".join(f"{size} on {', '.join(names)}" for size, names in sorted(sizes.items()))
            fix = "set the same on all and on the switch: sudo ip link set dev INTERFACE mtu 9000"
            yield Check("all", "mtu", Level.WARN, f"differs in {network}: {each}", fix)
