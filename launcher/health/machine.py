"""What machines say of themselves: a shell script (machine.sh), a parser that no output breaks, and what is wrong.

A node is read twice: before the benchmark (busy=False: who else computes there?), and while it computes (busy=True: is
something throttled?). What both readings show is an equal `Trouble`. Pure.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.health import gpu, infiniband
from launcher.health.gpu import GpuState
from launcher.health.infiniband import Port, common
from launcher.health.trouble import Trouble, number, plain

__all__ = ["LinkState", "MachineState", "Trouble", "between", "parse", "script", "troubles"]

_SLOWEST = 1000  # Mb/s: no network card of a GPU machine has less; 100 is what two of a cable's four pairs can carry
_CUT_OFF = ("124", "137")  # by timeout(1)
_CABLE = "check its cable and the switch's port, and that both ends negotiate: ethtool {link}"


@dataclass(frozen=True)
class LinkState:
    """A network interface: speed in Mb/s and MTU in bytes, 0 where they are not known (virtual cards, wireless)."""

    name: str = ""
    speed: int = 0
    mtu: int = 0
    duplex: str = ""  # "full", "half"


@dataclass(frozen=True)
class MachineState:
    """complete: the script came to its end; nvidia_smi: its exit code, None if there is none or it was cut off.

    Why nvidia-smi fails is said by planning.gpu_faults, which a run asks first.
    """

    gpus: tuple[GpuState, ...] = ()
    ports: tuple[Port, ...] = ()
    link: LinkState = LinkState()
    nvidia_smi: int | None = None
    complete: bool = False


@functools.cache
def script() -> str:
    """To be run by sh with two parameters: the interface that the plan chose or "", and the root of /sys or ""."""
    return Path(__file__).with_name("machine.sh").read_text(encoding="utf-8")


def parse(text: str) -> MachineState:
    """Read the script's output; what is missing, torn or of an unknown version is empty."""
    pieces = re.split(r"^@@(\w*)\s*$", text, flags=re.MULTILINE)
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    answer = sections.get("nvidia_smi", "")
    ended = re.search(r"^@exit (\d{1,3})$", answer, re.ASCII | re.MULTILINE)
    link = dict(re.findall(r"^(name|speed|mtu|duplex):(\S{1,40})$", sections.get("link", ""), re.MULTILINE))
    return MachineState(
        gpus=gpu.parse(answer),
        ports=infiniband.parse(sections.get("infiniband", "")),
        link=LinkState(
            plain(link.get("name", "")),
            number(link.get("speed", "")),
            number(link.get("mtu", "")),
            link.get("duplex", ""),
        ),
        nvidia_smi=int(ended[1]) if ended and ended[1] not in _CUT_OFF else None,
        complete="end" in sections,
    )


def troubles(node: str, state: MachineState, *, busy: bool) -> list[Trouble]:
    """What is wrong on one node. busy: it was read while the benchmark computed."""
    found = [each for one in state.gpus for each in gpu.troubles(node, one, busy=busy)]
    found += infiniband.troubles(node, state.ports)
    link = state.link
    what = ""
    if link.duplex == "half":
        what = "half duplex: it sends or receives, not both at once"
    elif 0 < link.speed < _SLOWEST:
        what = f"it negotiated {link.speed} Mb/s"
    if what:
        found.append(Trouble(node, _link(link), what, _CABLE.format(link=link.name)))
    return found


def between(states: Mapping[str, MachineState]) -> list[Trouble]:
    """What should be the same on all nodes: link speed, MTU, active ports and their rate, enforced power limits."""
    links = {node: state.link for node, state in states.items()}
    found = []
    speed = common(link.speed for link in links.values() if link.speed)
    mtu = common(link.mtu for link in links.values() if link.mtu)
    for node, link in links.items():
        if 0 < link.speed < speed:
            what = f"it negotiated {link.speed} Mb/s, the others {speed:.0f}"
            found.append(Trouble(node, _link(link), what, _CABLE.format(link=link.name)))
        if link.mtu and link.mtu != mtu:
            what = f"its MTU is {link.mtu}, that of the others {mtu:.0f}"
            fix = f"sudo ip link set dev {link.name} mtu {mtu:.0f}, also in its network configuration and the switch"
            found.append(Trouble(node, _link(link), what, fix))
    found += infiniband.between({node: state.ports for node, state in states.items()})
    return found + _limits(states)


def _link(link: LinkState) -> str:
    return f"link {link.name}"


def _limits(states: Mapping[str, MachineState]) -> list[Trouble]:
    """GPUs whose enforced power limit is lower than that of most of their model, though nobody asked for less."""
    every = [(node, one) for node, state in states.items() for one in state.gpus if one.power.limit]
    usual = {one.name: 0.0 for _, one in every}
    for name in usual:
        usual[name] = common(one.power.limit for _, one in every if one.name == name)
    return [
        Trouble(
            node,
            f"GPU {one.index}",
            f"its power limit is {one.power.limit} W, that of the other {one.name} {usual[one.name]:.0f} W",
            "check the power settings of the machine's management (BMC) and its power supplies",
        )
        for node, one in every
        if one.power.limit < usual[one.name] and one.power.requested >= one.power.default
    ]
