"""State of InfiniBand and RoCE ports from sysfs, and their problems. Pure.

/sys/class/infiniband: Documentation/ABI/stable/sysfs-class-infiniband of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.features.bench.health.problem import HealthProblem

_LINE = re.compile(r"^\./([\w.-]{1,64})/(?:ports/(\d{1,3})/)?([a-z_]+)(?:/(\w+))?(?:/(\d{1,4}))?(?::(.*))?$", re.ASCII)
_RATE = re.compile(r"(\d{1,5}(?:\.\d)?) Gb/sec(?: \((\d{1,2})X(?: (\w{2,6}))?\))?", re.ASCII)
_WIRE = "check its cable and the port at the other end; ibstat shows its state"


@dataclass(frozen=True)
class Port:
    """A port of a card. rate: in Gb/s; lanes: InfiniBand link width; 0 if unknown."""

    device: str  # "mlx5_0"
    number: int
    state: str = ""  # "ACTIVE", "DOWN", "INIT", "ARMED"
    physical: str = ""  # "LinkUp"; "Polling": no signal from the other end; "Disabled": switched off on this end
    rate: float = 0.0
    lanes: int = 0
    speed: str = ""  # "EDR", "NDR"; "" for SDR
    ethernet: bool = False  # RoCE
    rdma: bool = True  # False for iWARP and similar, which have no RoCE GID table
    card: str = ""  # identifies the card: equal for all of its ports
    gids: tuple[str, ...] | None = None  # types of its GIDs: "IB/RoCE v1", "RoCE v2"; None: not reported by the kernel

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}"

    @property
    def active(self) -> bool:
        return self.state.startswith("ACTIVE")


def parse(text: str) -> tuple[Port, ...]:
    """Parse the section of machine.sh's output: `./mlx5_0/ports/1/state:4: ACTIVE`."""
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
    valid = {text for index, text in types.items() if f"gids/{index}" in values}  # the other entries are zero
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
    """Return "ACTIVE" for "4: ACTIVE"."""
    match = re.fullmatch(r"\d{1,2}: (\w{1,30})", text, re.ASCII)
    return match[1] if match else ""


def problems(node: str, ports: Sequence[Port]) -> Iterator[HealthProblem]:
    """Yield the problems of a node's ports.

    Unused ports are not a problem: a port without a cable on a card with another active port, and a port that was
    switched off (Disabled) on a machine with an active port.
    """
    active = {port.card for port in ports if port.active}
    for port in ports:
        for what, fix in _port_problems(port, used=port.card in active, any_active=bool(active)):
            yield HealthProblem(node, f"InfiniBand {port.name}", what, fix)


def _port_problems(port: Port, *, used: bool, any_active: bool) -> Iterator[tuple[str, str]]:
    if port.physical == "LinkUp" and port.state and not port.active:
        # State INIT, or DOWN for a virtual function: the link is up, but has no address in the subnet
        yield (
            f"its link is up but its state is {port.state}: no subnet manager has configured it",
            "start the subnet manager (opensm or that of the switch); for a virtual function, set its GUID",
        )
    elif port.state and not port.active and not used and (port.physical != "Disabled" or not any_active):
        yield f"down ({port.physical or port.state})", _off(port)
    if not port.active:
        return
    if not port.ethernet and (port.lanes == 1 or (port.lanes and not port.speed)):
        rate = f"{port.rate:g} Gb/s, {port.lanes} lane{'s' * (port.lanes != 1)} of {port.speed or 'SDR'}"
        yield f"its link runs at {rate}: link training failed", _WIRE
    if port.ethernet and port.rdma and port.gids is not None and "RoCE v2" not in port.gids:
        if port.gids:
            yield (
                "no RoCE v2 GID: it has only v1, which is not routable and not used by NCCL",
                "use a card that supports v2 and update its driver; ConnectX-3 Pro: options mlx4_core roce_mode=2",
            )
        else:
            fix = "assign an IP address to its interface (ip addr); in a container, use the host network"
            yield "no RoCE GID: its interface has no address", fix


def _off(port: Port) -> str:
    return "enable it: sudo ip link set INTERFACE up, or ibportstate" if port.physical == "Disabled" else _WIRE


def between(states: Mapping[str, Sequence[Port]]) -> Iterator[HealthProblem]:
    """Yield problems of nodes that have fewer active ports or a lower rate than most. Ports are compared by name."""
    active = {node: {port.name: port for port in ports if port.active} for node, ports in states.items()}
    usual = common(len(ports) for ports in active.values())
    full = [node for node, ports in active.items() if len(ports) >= usual]
    names = {name for node in full for name in active[node]}
    for node, ports in states.items():
        if len(active[node]) >= usual:
            continue
        reported = {problem.part for problem in problems(node, ports)}
        down = [port for port in ports if not port.active and port.name in names]
        for port in down:
            if f"InfiniBand {port.name}" not in reported:
                what = f"down ({port.physical or port.state}), but active on {_some(full)}"
                yield HealthProblem(node, f"InfiniBand {port.name}", what, _off(port))
        if not down and not reported:
            what = f"{len(active[node])} active ports, but {usual} on {_some(full)}"
            fix = "check the hardware (lspci | grep -i -e mellanox -e infiniband) and the driver (ibstat)"
            yield HealthProblem(node, "InfiniBand", what, fix)
    for name in sorted({name for ports in active.values() for name in ports}):
        rates = {node: ports[name].rate for node, ports in active.items() if name in ports and ports[name].rate}
        usual_rate = common(rates.values())
        for node, rate in rates.items():
            if rate < usual_rate:
                others = _some([other for other, its in rates.items() if its == usual_rate])
                yield HealthProblem(node, f"InfiniBand {name}", f"{rate:g} Gb/s, but {usual_rate:g} on {others}", _WIRE)


def common(values: Iterable[float]) -> float:
    """Return the most frequent value, the greatest in case of a tie (so the lesser of two is reported); 0 for none."""
    listed = list(values)
    return max(listed, key=lambda value: (listed.count(value), value), default=0)


def _some(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
