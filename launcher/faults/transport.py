"""How gradients travel between the nodes of a run, read from NCCL's own log of its start. Pure.

The log is that of NCCL_DEBUG=INFO with the subsystems INIT, ENV and NET. Its lines differ between versions and network
plugins (2.18 to 2.29 were read), so unknown ones mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.faults.cause import Cause

TCP, LINKS = "TCP", {"IB": "InfiniBand", "RoCE": "RoCE"}
_SHOWN = 4  # devices that are named

_LINES = re.ASCII | re.MULTILINE
_VERSION = re.compile(r"\bNCCL version (\d{1,3}\.\d{1,3}\.\d{1,3})", re.ASCII)
_NETWORK = re.compile(r"NCCL INFO Using network ([\w. -]{1,40}?)[ \t\r]*$", _LINES)
_RDMA = re.compile(r"NCCL INFO NET/IB : Using (.*)$", _LINES)
_SOCKET = re.compile(r"NCCL INFO NET/Socket : Using (.*)$", _LINES)
_PROVIDER = re.compile(r"NCCL INFO NET/OFI Selected [Pp]rovider is ([\w;-]{1,40}).*?\(found (\d{1,4}) nics\)", _LINES)
_FUSED = re.compile(r"\[(\d{1,4})\]=\{([^}\n]*)\}", _LINES)  # ports that NCCL joins: [0]={[0] mlx5_2:1/RoCE, [1] ...}
_PORT = re.compile(r"\[(\d{1,4})\] ?([\w.-]{1,64}):\d{1,3}/(IB|RoCE)", _LINES)
_INTERFACE = re.compile(r"\[(\d{1,4})\]([\w.@-]{1,32}):", _LINES)
_MERGED = re.compile(r"NET/IB ?: Made virtual device \[(\d{1,4})\] name=([\w.+-]{1,200})", _LINES)
# A connection to another node: the network, its device, whether the GPU's memory is read and written by the card
_CONNECTION = re.compile(
    r"\[(?:send|receive)\] via (?:COLL)?NET/([\w. -]{1,40})/(\d{1,4})(?:\(\d{1,9}\))?(/GDRDMA)?", _LINES
)
_NO_DIRECT = re.compile(r"NET/IB\S* : GPU Direct RDMA Disabled for HCA")
_NO_DEVICE = "NET/IB : No device found"

_DOCTOR = "see `launcher doctor JOB`"
# Why NCCL uses no RDMA device, as it says itself, and the fix; the first that is found counts.
_REASONS = (
    (r"\bNCCL_IB_DISABLE set by environment to [1-9]", "NCCL_IB_DISABLE is set", "remove it from `env`"),
    (r"\bNCCL_NET set by environment to \"?(\w{1,40})", "NCCL_NET is set to {0}", "remove it from `env`"),
    (
        r"Failed to open libibverbs\.so",
        "the image has no libibverbs.so",
        "install libibverbs1 and ibverbs-providers in the image",
    ),
    (
        r"NET/IB : Unable to open device ([\w.-]{1,64})",
        "NCCL could not open {0}",
        f"the container needs /dev/infiniband; {_DOCTOR}",
    ),
    (r"NET/IB : No IP interface found", "NCCL found no interface with an IP address", "check NCCL_SOCKET_IFNAME"),
)
_HCA = re.compile(r"NCCL_IB_HCA set to ([\w.=^,:-]{1,200})", re.ASCII)
_WITHOUT_DIRECT = Cause("no nvidia_peermem and no DMA-BUF", "sudo modprobe nvidia_peermem on the nodes")


Port = tuple[str, str]  # its card, and the link: mlx5_0, RoCE


@dataclass(frozen=True)
class NcclLog:
    """What the logs of a node's processes say. All fields are empty if these have not come that far."""

    version: str = ""  # "2.27.6"
    network: str = ""  # "IB", "Socket", or the name of a plugin: "IBext_v8", "AWS Libfabric"
    ports: Mapping[int, Sequence[Port]] = field(default_factory=dict)  # of each RDMA device, by its number
    interfaces: Mapping[int, str] = field(default_factory=dict)  # for sockets, by number
    provider: tuple[str, int] = ("", 0)  # of libfabric, and the number of its cards
    used: frozenset[int] = frozenset()  # numbers of the devices with connections to other nodes
    direct: bool | None = None  # whether all these connections use GPUDirect; None: there is none yet
    no_direct: bool = False  # GPUDirect is impossible with one of the devices
    reason: Cause | None = None  # why no RDMA device is used


@dataclass(frozen=True)
class Wires:
    """What the node knows of its network. speeds: of interfaces, in Gb/s. active: its RDMA devices with a link."""

    speeds: Mapping[str, float] = field(default_factory=dict)
    active: tuple[str, ...] = ()


def parse(text: str) -> NcclLog:
    """Parse the logs of a node's processes, the newest last. Text that is torn, unknown or not of NCCL is accepted."""
    networks = _NETWORK.findall(text)
    connections = _CONNECTION.findall(text)
    # The last communicator counts: NCCL may have fallen back to another network.
    network = networks[-1] if networks else connections[-1][0] if connections else ""
    own = [(int(number), bool(direct)) for name, number, direct in connections if name == network]
    provider = _PROVIDER.search(text)
    version = _VERSION.search(text)
    return NcclLog(
        version=version[1] if version else "",
        network=network,
        ports=_ports(text),
        interfaces={int(n): name for line in _SOCKET.findall(text)[-1:] for n, name in _INTERFACE.findall(line)},
        provider=(provider[1], int(provider[2])) if provider else ("", 0),
        used=frozenset(number for number, _ in own),
        direct=all(direct for _, direct in own) if own else None,
        no_direct=_NO_DIRECT.search(text) is not None,
        reason=_reason(text),
    )


def _ports(text: str) -> dict[int, Sequence[Port]]:
    found: dict[int, Sequence[Port]] = {}
    for line in _RDMA.findall(text)[-1:]:
        found |= {int(number): [(name, link)] for number, name, link in _PORT.findall(_FUSED.sub("", line))}
        found |= {int(number): [port[1:] for port in _PORT.findall(inner)] for number, inner in _FUSED.findall(line)}
    links = dict(port for ports in found.values() for port in ports)
    for number, names in _MERGED.findall(text):
        found[int(number)] = [(name, links.get(name, "")) for name in names.split("+")]
    return found


def _reason(text: str) -> Cause | None:
    for pattern, what, fix in _REASONS:
        if found := re.search(pattern, text, re.ASCII):
            return Cause(what.format(*found.groups()), fix)
    if _NO_DEVICE not in text:
        return None
    if chosen := _HCA.search(text):
        return Cause(f"no active port is among NCCL_IB_HCA={chosen[1]}", "correct or remove it in `env`")
    fix = f"the container needs /dev/infiniband; {_DOCTOR}"
    return Cause("NCCL sees no RDMA device with an active port", fix)


def sentence(logs: Mapping[str, NcclLog], wires: Mapping[str, Wires]) -> str:
    """Return `gradients: RoCE on mlx5_0, mlx5_1, GPUDirect`, or "" while it is not known.

    logs: by node. If the nodes differ, each way is preceded by the nodes that use it.
    """
    ways: dict[str, list[str]] = {}
    for node, log in logs.items():
        if log.network:
            ways.setdefault(_way(log, wires.get(node, Wires())), []).append(node)
    if not ways:
        return ""
    alike = len(ways) == 1 and len(logs) == sum(map(len, ways.values()))
    return "gradients: " + "; ".join(way if alike else f"{_listed(nodes)}: {way}" for way, nodes in ways.items())


def settled(logs: Mapping[str, NcclLog]) -> bool:
    """Whether every node has connected to others, so that the sentence will not change."""
    return all(log.used for log in logs.values())


def _way(log: NcclLog, wires: Wires) -> str:
    if log.network == "Socket":
        return _tcp(log, wires)
    named: dict[str, list[str]] = {}
    for number in sorted(log.used or log.ports):
        for name, link in log.ports.get(number, ()):
            named.setdefault(LINKS.get(link, "RDMA"), []).append(name)
    if not named:
        return _by_plugin(log)
    devices = "; ".join(f"{link} on {_listed(names)}" for link, names in named.items())
    return f"{devices}{_direct(log)}"


def _tcp(log: NcclLog, wires: Wires) -> str:
    names = [name for number, name in log.interfaces.items() if not log.used or number in log.used]
    shown = _listed(f"{name} ({wires.speeds[name]:g} Gb/s)" if name in wires.speeds else name for name in names)
    way = f"{TCP} on {shown}" if shown else TCP
    if not wires.active:  # nothing better is known to exist
        return way
    way += f", although {_listed(wires.active)} {'is' if len(wires.active) == 1 else 'are'} active"
    return f"{way}: {log.reason.what} -> {log.reason.fix}" if log.reason else f"{way}: {_DOCTOR}"


def _by_plugin(log: NcclLog) -> str:
    """Describe a network of a plugin, whose devices NCCL does not name."""
    provider, cards = log.provider
    if provider == "efa":
        return f"EFA on {cards} cards{_direct(log)}"
    if provider.startswith("tcp"):
        return f"{TCP} by libfabric, which finds no EFA device -> {_DOCTOR}"
    name = "RDMA" if log.network.startswith("IB") else f"{log.network} (a network plugin of NCCL)"
    return f"{name}{_direct(log)}"


def _direct(log: NcclLog) -> str:
    if log.direct:
        return ", GPUDirect"
    if log.no_direct:
        return f", without GPUDirect: {_WITHOUT_DIRECT.what} -> {_WITHOUT_DIRECT.fix}"
    return "" if log.direct is None else ", without GPUDirect"


def _listed(names: Iterable[str]) -> str:
    return shortened(sorted(dict.fromkeys(names), key=_by_number))


def shortened(names: Sequence[str]) -> str:
    """Return `a, b, c, d and 4 more`."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _by_number(name: str) -> list[tuple[str, int]]:
    """Sort mlx5_10 after mlx5_2."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D+)(\d{0,9})", name)]
