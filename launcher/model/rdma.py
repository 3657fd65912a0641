"""RDMA ports (InfiniBand, RoCE) of a machine as its kernel reports them, and the one way to read that. Pure.

/sys/class/infiniband: Documentation/ABI/stable/sysfs-class-infiniband of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_LINE = re.compile(r"^\./([\w.-]{1,64})/(?:ports/(\d{1,3})/)?([a-z_]+)(?:/(\w+))?(?:/(\d{1,4}))?(?::(.*))?$", re.ASCII)
_RATE = re.compile(r"(\d{1,5}(?:\.\d)?) Gb/sec(?: \((\d{1,2})X(?: (\w{2,6}))?\))?", re.ASCII)
_IPV4 = re.compile(r"0000:0000:0000:0000:0000:ffff:([0-9a-f]{4}):([0-9a-f]{4})", re.ASCII)
_INTERFACE = re.compile(r"[\w.@-]{1,15}", re.ASCII)
_MELLANOX, _AMAZON = "0x15b3", "0x1d0f"  # PCI vendors: of NVIDIA's ConnectX and BlueField too; of EFA


@dataclass(frozen=True)
class Gid:
    """An entry of a RoCE port's address table that is in use."""

    index: int
    type: str  # "IB/RoCE v1", "RoCE v2"
    address: str  # IPv4; "" for IPv6, such as the link-local address that each port has
    interface: str = ""  # that has the address: "enp1s0f0np0", or one on top of it: "bond0", "enp1s0f0np0.100"


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
    rdma: bool = True  # InfiniBand or RoCE; False for iWARP, EFA and similar
    card: str = ""  # identifies the card: equal for all of its ports
    gids: tuple[str, ...] | None = None  # types of its GIDs: "IB/RoCE v1", "RoCE v2"; None: not reported by the kernel
    table: tuple[Gid, ...] = ()  # its GIDs, if their types are reported
    vendor: str = ""  # of the card on the PCI bus: "0x15b3"
    interface: str = ""  # its network interface, of a RoCE port: "enp1s0f0np0"
    virtual: bool = False  # a virtual function (SR-IOV), which may belong to a virtual machine or another container

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}"

    @property
    def connectx(self) -> bool:
        return self.vendor == _MELLANOX

    @property
    def efa(self) -> bool:
        return self.vendor == _AMAZON

    @property
    def addresses(self) -> tuple[Gid, ...]:
        """Its RoCE v2 GIDs with an IPv4 address, which NCCL uses between machines."""
        return tuple(gid for gid in self.table if gid.type == "RoCE v2" and gid.address)

    @property
    def active(self) -> bool:
        return self.state.startswith("ACTIVE")


def parse(text: str) -> tuple[Port, ...]:
    """Parse lines of grep(1) in that folder: `./mlx5_0/ports/1/state:4: ACTIVE`. Others are ignored."""
    values: dict[tuple[str, int], dict[str, str]] = {}
    cards: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if (match := _LINE.match(line)) is None:
            continue
        device, number, name, kind, index, value = match.groups(default="")
        key = "/".join(part for part in (name, kind, index) if part)
        if not number:
            cards.setdefault(device, {})[key] = value
        else:
            values.setdefault((device, int(number)), {})[key] = value.strip()
    return tuple(
        _port(device, number, found, cards.get(device, {})) for (device, number), found in sorted(values.items())
    )


def _port(device: str, number: int, values: Mapping[str, str], card: Mapping[str, str]) -> Port:
    rate = _RATE.match(values.get("rate", ""))
    types = {path.rpartition("/")[2]: text for path, text in values.items() if path.startswith("gid_attrs/types/")}
    table = tuple(  # the other entries are zero
        Gid(int(index), text, _ipv4(values[f"gids/{index}"]), _interface(values.get(f"gid_attrs/ndevs/{index}", "")))
        for index, text in sorted(types.items(), key=lambda entry: int(entry[0]))
        if f"gids/{index}" in values
    )
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
        gids=tuple(sorted({gid.type for gid in table})) if "gid_attrs/types" in values else None,
        table=table,
        vendor=card.get("device/vendor", ""),
        interface=next((gid.interface for gid in table if gid.interface), ""),
        virtual="device/physfn" in card,
    )


def _ipv4(gid: str) -> str:
    match = _IPV4.fullmatch(gid)
    return ".".join(str(byte) for byte in bytes.fromhex(match[1] + match[2])) if match else ""


def _interface(text: str) -> str:
    return text if _INTERFACE.fullmatch(text) else ""


def _word(text: str) -> str:
    """Return "ACTIVE" for "4: ACTIVE"."""
    match = re.fullmatch(r"\d{1,2}: (\w{1,30})", text, re.ASCII)
    return match[1] if match else ""
