"""The state of InfiniBand and RoCE ports by sysfs, and what is wrong with them. Pure.

/sys/class/infiniband: Documentation/ABI/stable/sysfs-class-infiniband of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.health.trouble import Trouble

_LINE = re.compile(r"^\./([\w.-]{1,64})/(?:ports/(\d{1,3})/)?([a-z_]+)(?:/(\w+))?(?:/(\d{1,4}))?(?::(.*))?$", re.ASCII)
_RATE = re.compile(r"(\d{1,5}(?:\.\d)?) Gb/sec(?: \((\d{1,2})X(?: (\w{2,6}))?\))?", re.ASCII)
_WIRE = "check its cable and the port at the other end; ibstat shows its state"


@dataclass(frozen=True)
class Port:
    """A port of a card. rate: Gb/s; lanes: as InfiniBand counts them; 0 where they are not known."""

    device: str  # "mlx5_0"
    number: int
    state: str = ""  # "ACTIVE", "DOWN", "INIT", "ARMED"
    physical: str = ""  # "LinkUp", "Polling": no signal from the other end; "Disabled": switched off here
    rate: float = 0.0
    lanes: int = 0
    speed: str = ""  # "EDR", "NDR"; "" for SDR
    ethernet: bool = False  # RoCE
    rdma: bool = True  # False for iWARP and the like, which have no GID table of RoCE
    card: str = ""  # the same for the ports of one card
    gids: tuple[str, ...] | None = None  # types of its GIDs: "IB/RoCE v1", "RoCE v2"; None: the kernel does not say

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}"

    @property
    def active(self) -> bool:
        return self.state.startswith("ACTIVE")


def parse(text: str) -> tuple[Port, ...]:
    """From the section of machine.sh: `./mlx5_0/ports/1/state:4: ACTIVE`."""
    values: dict[tuple[str, int], dict[str, str]] = {}
    cards: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        device, number, name, kind, index, value = match.groups(default="")
        if not number:
            cards.setdefault(device, {})[name] = value
        else:
            key = "/".join(part for part in (name, kind, index) if part)
            values.setdefault((device, int(number)), {})[key] = value.strip()
    return tuple(
        _port(device, number, found, cards.get(device, {})) for (device, number), found in sorted(values.items())
    )


def _port(device: str, number: int, values: Mapping[str, str], card: Mapping[str, str]) -> Port:
    rate = _RATE.match(values.get("rate", ""))
    types = {path.rpartition("/")[2]: text for path, text in values.items() if path.startswith("gid_attrs/types/")}
    valid = {text for index, text in types.items() if f"gids/{index}" in values}  # others are zeros
    return Port(
        device=device,
        number=number,
        state=_word(values.get("state", "")),
        physical=_word(values.get("phys_state", "")),
        rate=float(rate[1]) if rate else 0.0,
        lanes=int(rate[2] or 0) if rate else 0,
        speed=(rate[3] or "") if rate else "",
        ethernet=values.get("link_layer") == "Ethernet",
        rdma=card.get("node_type", "1").startswith("1"),
        card=card.get("sys_image_guid", device),
        gids=tuple(sorted(valid)) if "gid_attrs/types" in values else None,
    )


def _word(text: str) -> str:
    """Of "4: ACTIVE"."""
    match = re.fullmatch(r"\d{1,2}: (\w{1,30})", text, re.ASCII)
    return match[1] if match else ""


def troubles(node: str, ports: Sequence[Port]) -> Iterator[Trouble]:
    """Unused ports are no fault: one without a cable beside an active one of the same card, and one that was switched
    off (Disabled) on a machine that has an active port."""
    active = {port.card for port in ports if port.active}
    for port in ports:
        for what, fix in _port_troubles(port, used=port.card in active, any_active=bool(active)):
            yield Trouble(node, f"InfiniBand {port.name}", what, fix)


def _port_troubles(port: Port, *, used: bool, any_active: bool) -> Iterator[tuple[str, str]]:
    if port.physical == "LinkUp" and port.state and not port.active:
        # State INIT, or DOWN for a virtual function: a link, but no address in the subnet
        yield (
            f"its link is up but its state is {port.state}: no subnet manager has configured it",
            "start the subnet manager (opensm, or the switch's own); for a virtual function, set its GUID",
        )
    elif port.state and not port.active and not used and (port.physical != "Disabled" or not any_active):
        yield f"down ({port.physical or port.state})", _off(port)
    if not port.active:
        return
    if not port.ethernet and (port.lanes == 1 or (port.lanes and not port.speed)):
        what = f"its link has {port.rate:g} Gb/s, {port.lanes} lane(s) of {port.speed or 'SDR'}: it was trained badly"
        yield what, _WIRE
    if port.ethernet and port.rdma and port.gids is not None and "RoCE v2" not in port.gids:
        if port.gids:
            yield (
                "RoCE without a v2 GID: it has v1 only, which no router passes on and NCCL does not choose",
                "a card that can do v2 and its current driver; ConnectX-3 Pro: options mlx4_core roce_mode=2",
            )
        else:
            fix = "give its interface an IP address: ip addr; in a container, use the host's network"
            yield "RoCE without any GID: its interface has no address", fix


def _off(port: Port) -> str:
    return "switch it on: sudo ip link set INTERFACE up, or ibportstate" if port.physical == "Disabled" else _WIRE


def between(states: Mapping[str, Sequence[Port]]) -> Iterator[Trouble]:
    """What nodes have less of than the most of them: active ports, and their rate. By the ports' names."""
    active = {node: {port.name: port for port in ports if port.active} for node, ports in states.items()}
    usual = common(len(ports) for ports in active.values())
    full = [node for node, ports in active.items() if len(ports) >= usual]
    names = {name for node in full for name in active[node]}
    for node, ports in states.items():
        if len(active[node]) >= usual:
            continue
        told = {trouble.part for trouble in troubles(node, ports)}
        down = [port for port in ports if not port.active and port.name in names]
        for port in down:
            if f"InfiniBand {port.name}" not in told:
                what = f"down ({port.physical or port.state}), active on {_some(full)}"
                yield Trouble(node, f"InfiniBand {port.name}", what, _off(port))
        if not down and not told:
            what = f"{len(active[node])} active ports, {usual} on {_some(full)}"
            fix = "lspci | grep -i -e mellanox -e infiniband; is its driver loaded? ibstat"
            yield Trouble(node, "InfiniBand", what, fix)
    for name in sorted({name for ports in active.values() for name in ports}):
        rates = {node: ports[name].rate for node, ports in active.items() if name in ports and ports[name].rate}
        usual_rate = common(rates.values())
        for node, rate in rates.items():
            if rate < usual_rate:
                others = _some([other for other, its in rates.items() if its == usual_rate])
                yield Trouble(node, f"InfiniBand {name}", f"{rate:g} Gb/s, {usual_rate:g} on {others}", _WIRE)


def common(values: Iterable[float]) -> float:
    """The most frequent, of several the greatest: with two nodes the one that has less is named. 0 for none."""
    listed = list(values)
    return max(listed, key=lambda value: (listed.count(value), value), default=0)


def _some(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
