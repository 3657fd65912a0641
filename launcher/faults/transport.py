"""How gradients travel between the nodes of a run, read from NCCL's own log of its start. Pure.

The log is that of NCCL_DEBUG=INFO with the subsystems INIT, ENV and NET. Its lines differ between versions and network
plugins (2.18 to 2.29 were read), so unknown ones mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from launcher.container_scripts.words import bounded
from launcher.faults.cause import Cause
from launcher.naming import first_of

TCP, LINKS = "TCP", {"IB": "InfiniBand", "RoCE": "RoCE"}
_SHOWN = 4  # devices that are named

_LINES = re.ASCII | re.MULTILINE
_PROCESS = re.compile(r"(?<!\S)(\S{1,300}:\d{1,10}):\d{1,10} \[\d{1,4}\] NCCL ", re.ASCII)  # host:process:thread [GPU]
_NETWORK = re.compile(r"NCCL INFO Using network ([\w. -]{1,40}?)[ \t\r]*$", _LINES)
_RDMA = re.compile(r"NCCL INFO NET/IB : Using (.*)$", _LINES)
_SOCKET = re.compile(r"NCCL INFO NET/Socket : Using (.*)$", _LINES)
_PROVIDER = re.compile(
    r"NCCL INFO NET/OFI Selected [Pp]rovider is ([\w;-]{1,40})(?:.*?\(found (\d{1,4}) nics\))?", _LINES
)
# A device, or ports that NCCL joins to one: [2]mlx5_2:1/RoCE, [0]={[0] mlx5_2:1/RoCE, [1] mlx5_3:1/RoCE}. Its number is
# its place in the line: NCCL 2.20 to 2.23 print that of the port.
_DEVICE = re.compile(r"\[\d{1,4}\](?:=\{([^}\n]{0,300})\}|([\w.-]{1,64}:[\d:]{1,20}/\w{2,16}))", _LINES)
_PORT = re.compile(r"([\w.-]{1,64}):[\d:]{1,20}/(IB|RoCE)", _LINES)
_INTERFACE = re.compile(r"\[(\d{1,4})\]([\w.@-]{1,32}):", _LINES)
_MERGED = re.compile(r"NET/IB ?: Made virtual device \[(\d{1,4})\] name=([\w.+-]{1,400})", _LINES)
# A connection to another node: the network, its device, whether the GPU's memory is read and written by the card
_CONNECTION = re.compile(
    r"\[(?:send|receive)\] via (?:COLL)?NET/([\w. -]{1,40})/(\d{1,4})(?:\(\d{1,9}\))?(/GDRDMA)?", _LINES
)
_NO_DIRECT = re.compile(r"NET/IB\S* : GPU Direct RDMA Disabled for HCA")
_NO_DEVICE = "NET/IB : No device found"

_DOCTOR = "see `launcher doctor JOB`"
# AWS's plug-in, without which NCCL looks for InfiniBand and then falls back to sockets
_NO_EFA = re.compile(r"NET/OFI (?:Could not|Couldn't) find any optimal provider|NET/OFI OFI fi_getinfo\(\) call failed")
_WITHOUT_EFA = Cause(
    "NCCL's plug-in aws-ofi-nccl finds no EFA",
    "`fi_info -p efa` in the container must list it: it needs /dev/infiniband, and the image EFA's libfabric",
)
# Why NCCL uses no RDMA device, as it says itself, and the fix; the first that is found counts.
_REASONS = (
    (r"\bNCCL_IB_DISABLE set by environment to [1-9]", "NCCL_IB_DISABLE is set", "remove it from `env` or the image"),
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
)
_HCA = re.compile(r"NCCL_IB_HCA set to ([\w.=^,:-]{1,200})", re.ASCII)
_UNKNOWN = Cause("NCCL does not say why", f"check NCCL_NET and NCCL_IB_HCA; {_DOCTOR}")
_WITHOUT_DIRECT = Cause(
    "NCCL finds neither nvidia_peermem nor DMA-BUF",
    "sudo modprobe nvidia_peermem on the nodes; exceptions: docs/gpu.md",
)
_LOADED = "NCCL does not use nvidia_peermem, which is loaded"
_SEES_IT = (2, 23)  # NCCL; earlier ones do not see that of newer drivers: github.com/NVIDIA/nccl/issues/1676
_VERSION = re.compile(r"NCCL version (\d{1,3})\.(\d{1,3})\.", re.ASCII)
NEVER, LOADED = "never", "loaded"  # what is known of GPUDirect on a node

Port = tuple[str, str]  # its name, and the link: mlx5_0, RoCE; or an interface for sockets: eth0, ""


@dataclass(frozen=True)
class NcclLog:
    """What the logs of a node's processes say. All fields are empty if these have not come that far."""

    network: str = ""  # "IB", "Socket", or the name of a plugin: "IBext_v8", "AWS Libfabric"
    ports: tuple[Port, ...] = ()  # of the connections to other nodes; before the first one, all that NCCL has found
    provider: tuple[str, int] = ("", 0)  # of libfabric, and the number of its cards
    connections: int = 0  # to other nodes
    direct: int = 0  # of these, with GPUDirect
    no_direct: bool = False  # GPUDirect is impossible with one of the devices
    reason: Cause | None = None  # why no RDMA device is used
    no_efa: bool = False  # a plug-in for EFA found none
    version: tuple[int, ...] = ()  # of NCCL: (2, 27)
    processes: int = 0
    others: tuple[NcclLog, ...] = ()  # of processes that use another network


@dataclass(frozen=True)
class Wires:
    """What the node knows of its network. speeds: of interfaces, in Gb/s. active: its RDMA devices with a link.

    efa: these are EFA. gpudirect: NEVER with its GPUs, LOADED if nvidia_peermem is; "" if neither is known.
    """

    speeds: Mapping[str, float] = field(default_factory=dict)
    active: tuple[str, ...] = ()
    efa: bool = False
    gpudirect: str = ""


def parse(text: str) -> NcclLog:
    """Parse the logs of a node's processes, the newest last. Text that is torn, unknown or not of NCCL is accepted."""
    text = bounded(text)
    by_network: dict[str, list[str]] = {}
    own = [(_network_of(each), each) for each in _by_process(text)]
    sending = [(network, each) for network, each in own if network and _CONNECTION.search(each)]
    for network, each in sending or own:
        by_network.setdefault(network, []).append(each)
    by_network = {network: logs for network, logs in by_network.items() if network} or {"": []}
    # what most of them use is the node's
    first, *others = sorted(by_network, key=lambda network: -len(by_network[network]))
    parts = [_of_network(text, network, by_network[network]) for network in (first, *others)]
    return replace(parts[0], others=tuple(parts[1:]))


def _network_of(text: str) -> str:
    """Return the network of a process. Its last communicator counts: NCCL may have fallen back to another network."""
    networks = _NETWORK.findall(text) or [name for name, _, _ in _CONNECTION.findall(text)]
    return networks[-1] if networks else ""


def _of_network(text: str, network: str, logs: Sequence[str]) -> NcclLog:
    """Return what the logs of the processes that use a network say. text: of all."""
    devices = _devices(text, network)
    every = [_of_process(own, network, devices) for own in logs]
    connected = [each for each in every if each.connections] or every
    provider, version = _PROVIDER.search(text), _VERSION.search(text)
    return NcclLog(
        network=network,
        ports=tuple(sorted({port for each in connected for port in each.ports})),
        provider=(provider[1], int(provider[2] or 0)) if provider else ("", 0),
        connections=sum(each.connections for each in every),
        direct=sum(each.direct for each in every),
        no_direct=_NO_DIRECT.search(text) is not None,
        reason=_reason(text),
        no_efa=_NO_EFA.search(text) is not None,
        version=(int(version[1]), int(version[2])) if version else (),
        processes=len(logs),
    )


def _by_process(text: str) -> list[str]:
    found: dict[str, list[str]] = {}
    process = ""
    for line in text.split("\n"):
        if begin := _PROCESS.search(line):
            process = begin[1]
        found.setdefault(process, []).append(line)
    return ["\n".join(lines) for lines in found.values()]


def _of_process(text: str, network: str, devices: Mapping[int, Sequence[Port]]) -> NcclLog:
    """Return the ports and connections of this network. devices: for a log that does not name any."""
    own = [(int(number), direct) for name, number, direct in _CONNECTION.findall(text) if name == network]
    found = _devices(text, network) or devices  # NCCL_IB_HCA may differ between processes
    used = {number for number, _ in own} or found.keys()
    return NcclLog(
        # None if one is not known: the others alone would be a wrong answer.
        ports=tuple(port for number in sorted(used) for port in found[number]) if used <= found.keys() else (),
        connections=len(own),
        direct=sum(bool(direct) for _, direct in own),
    )


def _devices(text: str, network: str) -> dict[int, list[Port]]:
    """Return the ports of each device of the network, by its number."""
    if network == "Socket":
        line = "".join(_SOCKET.findall(text)[-1:])
        return {int(number): [(name, "")] for number, name in _INTERFACE.findall(line)}
    if not network.startswith("IB"):
        return {}
    line = "".join(_RDMA.findall(text)[-1:])
    found = {number: _PORT.findall(joined or alone) for number, (joined, alone) in enumerate(_DEVICE.findall(line))}
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
        return Cause(f"NCCL sees no active port among NCCL_IB_HCA={chosen[1]}", f"correct it; {_DOCTOR}")
    fix = f"the container needs /dev/infiniband, the image ibverbs-providers (EFA: aws-ofi-nccl); {_DOCTOR}"
    return Cause("NCCL sees no RDMA device with an active port", fix)


def sentence(logs: Mapping[str, NcclLog], wires: Mapping[str, Wires]) -> str:
    """Return `gradients: RoCE on mlx5_0, mlx5_1, GPUDirect`, or "" while it is not known.

    logs: by node. If the nodes differ, each way is preceded by the nodes that use it.
    """
    ways: dict[str, list[str]] = {}
    for node, log in logs.items():
        if log.network:
            ways.setdefault(_ways(log, wires.get(node, Wires())), []).append(node)
    if not ways:
        return ""
    alike = len(ways) == 1 and len(logs) == sum(map(len, ways.values()))
    return "gradients: " + "; ".join(way if alike else f"{_listed(nodes)}: {way}" for way, nodes in ways.items())


def settled(logs: Mapping[str, NcclLog]) -> bool:
    """Whether every node has connected to others, so that the sentence will not change."""
    return all(log.connections for log in logs.values())


def _ways(log: NcclLog, wires: Wires) -> str:
    if not log.others:
        return _way(log, wires)
    every = (log, *log.others)
    count = sum(part.processes for part in every)
    return "; ".join(f"{part.processes} of {count} processes: {_way(part, wires)}" for part in every)


def _way(log: NcclLog, wires: Wires) -> str:
    if log.network == "Socket":
        return _tcp(log, wires)
    named: dict[str, list[str]] = {}
    for name, link in log.ports:
        named.setdefault(LINKS.get(link, "RDMA"), []).append(name)
    devices = "; ".join(f"{link} on {_listed(names)}" for link, names in named.items())
    return f"{devices or _by_plugin(log)}{_direct(log, wires)}"


def _tcp(log: NcclLog, wires: Wires) -> str:
    speeds = wires.speeds
    shown = _listed(f"{name} ({speeds[name]:g} Gb/s)" if name in speeds else name for name, _ in log.ports)
    way = f"{TCP} on {shown}" if shown else TCP
    if not wires.active:  # nothing better is known to exist
        return way
    why = _WITHOUT_EFA if wires.efa and log.no_efa else log.reason or _UNKNOWN
    verb = "is" if len(wires.active) == 1 else "are"
    return f"{way}, although {_listed(wires.active)} {verb} active: {why.what} -> {why.fix}"


def _by_plugin(log: NcclLog) -> str:
    """Describe a network whose devices NCCL does not name."""
    provider, cards = log.provider
    if provider == "efa":
        return f"EFA on {cards} card{'s' * (cards != 1)}" if cards else "EFA"
    if provider.startswith("tcp"):
        return f"{TCP} by libfabric"
    return "RDMA" if log.network.startswith("IB") else f"{log.network} (a network plugin of NCCL)"


def _direct(log: NcclLog, wires: Wires) -> str:
    if 0 < log.direct < log.connections:  # before Ampere, cards read no GPU's memory without NVLink
        return ", GPUDirect in part"
    if log.direct:
        return ", GPUDirect"
    if wires.gpudirect == NEVER:
        return ", without GPUDirect, which these GPUs do not have" if log.connections or log.no_direct else ""
    if log.no_direct and wires.gpudirect == LOADED:
        old = bool(log.version) and log.version < _SEES_IT
        return f", without GPUDirect: {_LOADED}" + " -> use an image with torch 2.7 or newer (NCCL 2.23)" * old
    if log.no_direct:
        return f", without GPUDirect: {_WITHOUT_DIRECT.what} -> {_WITHOUT_DIRECT.fix}"
    return ", without GPUDirect" if log.connections else ""


def _listed(names: Iterable[str]) -> str:
    return shortened(sorted(dict.fromkeys(names), key=_by_number))


def shortened(names: Sequence[str]) -> str:
    """Return `a, b, c, d and 4 more`."""
    return first_of(names, _SHOWN)


def _by_number(name: str) -> list[tuple[str, int]]:
    """Sort mlx5_10 after mlx5_2."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D+)(\d{0,9})", name)]
