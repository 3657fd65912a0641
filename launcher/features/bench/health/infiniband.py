"""Problems of InfiniBand and RoCE ports. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from launcher.features.bench.health.problem import HealthProblem
from launcher.model.rdma import Port
from launcher.naming import first_of

_WIRE = "check its cable and the port at the other end; ibstat shows its state"


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
                "no RoCE v2 GID: it has only v1, which is not routable",
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
                what = f"down ({port.physical or port.state}), but active on {first_of(full, 3)}"
                yield HealthProblem(node, f"InfiniBand {port.name}", what, _off(port))
        if not down and not reported:
            what = f"{len(active[node])} active ports, but {usual} on {first_of(full, 3)}"
            fix = "check the hardware (lspci | grep -i -e mellanox -e infiniband) and the driver (ibstat)"
            yield HealthProblem(node, "InfiniBand", what, fix)
    for name in sorted({name for ports in active.values() for name in ports}):
        rates = {node: ports[name].rate for node, ports in active.items() if name in ports and ports[name].rate}
        usual_rate = common(rates.values())
        for node, rate in rates.items():
            if rate < usual_rate:
                others = first_of([other for other, its in rates.items() if its == usual_rate], 3)
                yield HealthProblem(node, f"InfiniBand {name}", f"{rate:g} Gb/s, but {usual_rate:g} on {others}", _WIRE)


def common(values: Iterable[float]) -> float:
    """Return the most frequent value, the greatest in case of a tie (so the lesser of two is reported); 0 for none."""
    listed = list(values)
    return max(listed, key=lambda value: (listed.count(value), value), default=0)
