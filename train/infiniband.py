"""Whether the InfiniBand ports of this machine carry anything: NCCL falls back to sockets without an error.

Read from /sys/class/infiniband (Linux, Documentation/ABI/stable/sysfs-class-infiniband). Ports of Ethernet cards
(RoCE) are left out, because most of them have other work. IP over InfiniBand moves the same counters, so NCCL's sockets
on such an interface are not seen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/sys/class/infiniband")
COUNTERS = ("port_xmit_data", "port_rcv_data")  # in units of 4 bytes
FULL = 2**32 - 1  # at which a counter of 32 bits stops, on old cards
LITTLE = 2**18  # 1 MiB: a subnet manager asks for less
AFTER = 60.0  # seconds


def read(root: Path = ROOT) -> dict[str, int]:
    """Active InfiniBand port, such as mlx5_0:1 -> what it has sent and received, in units of 4 bytes."""
    found = {}
    for port in sorted(root.glob("*/ports/*")):
        try:
            active = (port / "state").read_text().startswith("4:")
            layer = (port / "link_layer").read_text().strip()
            moved = [int((port / "counters" / name).read_text()) for name in COUNTERS]
        except (OSError, ValueError):  # a counter that the card does not have says EINVAL
            continue
        if active and layer == "InfiniBand" and FULL not in moved:
            found[f"{port.parent.parent.name}:{port.name}"] = sum(moved)
    return found


def flat(before: dict[str, int], after: dict[str, int]) -> int:
    """The number of ports that were active all the time and carried next to nothing."""
    return sum(1 for port, moved in before.items() if port in after and 0 <= after[port] - moved < LITTLE)


class Ports:
    """The ports of this machine in the first minute of training."""

    def __init__(self, watched: bool, root: Path = ROOT) -> None:
        """`watched`: whether this rank looks at them, one on each of several machines."""
        self._root, self._since = root, time.monotonic()
        self._before = read(root) if watched else {}

    def look(self) -> tuple[float, float]:
        """How many ports were flat, and how many there are, when the first minute is over; else zeros."""
        if not self._before or time.monotonic() - self._since < AFTER:
            return 0.0, 0.0
        before, self._before = self._before, {}
        return float(flat(before, read(self._root))), float(len(before))


def warning(nodes: Sequence[str], ports: Sequence[tuple[float, float]]) -> str:
    """`nodes`: rank -> its node's name; `ports`: rank -> what `look` gave there. "" if no port was flat."""
    where = ", ".join(dict.fromkeys(node for node, (flat, _) in zip(nodes, ports, strict=True) if flat))
    idle, active = (int(sum(each)) for each in zip(*ports, strict=True))
    if not idle:
        return ""
    return (
        f"{idle} of {active} active InfiniBand ports carried nothing in the first minute (on {where}); NCCL may use "
        f"sockets instead: run with NCCL_DEBUG=INFO, and check NCCL_IB_DISABLE and NCCL_IB_HCA"
    )
