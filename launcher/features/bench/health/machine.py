"""Hardware state of machines: a shell script (machine.sh), a parser that accepts any output, and the problems found.

Each node is read twice: before the benchmark (busy=False: is the machine in use?) and during it (busy=True: is anything
throttled?). A problem found in both readings compares equal. Pure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.features.bench.health import gpu, infiniband
from launcher.features.bench.health.gpu import GpuState
from launcher.features.bench.health.infiniband import common
from launcher.features.bench.health.problem import HealthProblem, number, plain
from launcher.model import rdma

__all__ = ["HealthProblem", "LinkState", "MachineState", "between", "parse", "problems", "script"]

_SLOWEST = 1000  # Mb/s: the minimum on a GPU machine; at 100, only two of a cable's four pairs work
_CUT_OFF = ("124", "137")  # by timeout(1)
_CABLE = "check its cable, the switch port and autonegotiation on both ends: ethtool {link}"


@dataclass(frozen=True)
class LinkState:
    """A network interface: speed in Mb/s and MTU in bytes; 0 if unknown (virtual and wireless interfaces)."""

    name: str = ""
    speed: int = 0
    mtu: int = 0
    duplex: str = ""  # "full", "half"


@dataclass(frozen=True)
class MachineState:
    """complete: the script finished; nvidia_smi: its exit code, None if it is missing or timed out.

    planning.gpu_faults reports why nvidia-smi fails; runs check that first.
    """

    gpus: tuple[GpuState, ...] = ()
    ports: tuple[rdma.Port, ...] = ()
    link: LinkState = LinkState()
    nvidia_smi: int | None = None
    complete: bool = False


@functools.cache
def script() -> str:
    """Return a script for sh. Its parameters: the interface chosen by the plan or "", and the root of /sys or ""."""
    return Path(__file__).with_name("machine.sh").read_text(encoding="utf-8")


def parse(text: str) -> MachineState:
    """Parse the script's output. Missing, truncated and unknown values are left empty."""
    pieces = re.split(r"^@@(\w*)\s*$", text, flags=re.MULTILINE)
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    answer = sections.get("nvidia_smi", "")
    ended = re.search(r"^@exit (\d{1,3})$", answer, re.ASCII | re.MULTILINE)
    link = dict(re.findall(r"^(name|speed|mtu|duplex):(\S{1,40})$", sections.get("link", ""), re.MULTILINE))
    return MachineState(
        gpus=gpu.parse(answer),
        ports=rdma.parse(sections.get("infiniband", "")),
        link=LinkState(
            plain(link.get("name", "")),
            number(link.get("speed", "")),
            number(link.get("mtu", "")),
            link.get("duplex", ""),
        ),
        nvidia_smi=int(ended[1]) if ended and ended[1] not in _CUT_OFF else None,
        complete="end" in sections,
    )


def problems(node: str, state: MachineState, *, busy: bool) -> list[HealthProblem]:
    """Return the problems of one node. busy: the state was read during the benchmark."""
    found = [each for one in state.gpus for each in gpu.problems(node, one, busy=busy)]
    found += infiniband.problems(node, state.ports)
    link = state.link
    what = ""
    if link.duplex == "half":
        what = "half duplex: it cannot send and receive at the same time"
    elif 0 < link.speed < _SLOWEST:
        what = f"it negotiated {link.speed} Mb/s"
    if what:
        found.append(HealthProblem(node, _link(link), what, _CABLE.format(link=link.name)))
    return found


def between(states: Mapping[str, MachineState]) -> list[HealthProblem]:
    """Return differences between nodes: link speed, MTU, active ports and their rate, enforced power limits."""
    links = {node: state.link for node, state in states.items()}
    found = []
    speed = common(link.speed for link in links.values() if link.speed)
    mtu = common(link.mtu for link in links.values() if link.mtu)
    for node, link in links.items():
        if 0 < link.speed < speed:
            what = f"it negotiated {link.speed} Mb/s, the other nodes {speed:.0f}"
            found.append(HealthProblem(node, _link(link), what, _CABLE.format(link=link.name)))
        if link.mtu and link.mtu != mtu:
            what = f"its MTU is {link.mtu}, that of the other nodes {mtu:.0f}"
            fix = f"sudo ip link set dev {link.name} mtu {mtu:.0f}; also in the network configuration and on the switch"
            found.append(HealthProblem(node, _link(link), what, fix))
    found += infiniband.between({node: state.ports for node, state in states.items()})
    return found + _limits(states)


def _link(link: LinkState) -> str:
    return f"link {link.name}"


def _limits(states: Mapping[str, MachineState]) -> list[HealthProblem]:
    """Return GPUs with an enforced power limit below the usual one of their model that was not set by a user."""
    every = [(node, one) for node, state in states.items() for one in state.gpus if one.power.limit]
    usual = {one.name: 0.0 for _, one in every}
    for name in usual:
        usual[name] = common(one.power.limit for _, one in every if one.name == name)
    return [
        HealthProblem(
            node,
            f"GPU {one.index}",
            f"its power limit is {one.power.limit} W, that of the other {one.name} {usual[one.name]:.0f} W",
            "check the power settings of the machine's management (BMC) and its power supplies",
        )
        for node, one in every
        if one.power.limit < usual[one.name] and one.power.requested >= one.power.default
    ]
