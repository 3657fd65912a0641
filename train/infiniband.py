"""Detect unused InfiniBand ports: NCCL falls back to sockets without an error.

Counters: /sys/class/infiniband (Linux, Documentation/ABI/stable/sysfs-class-infiniband). Ports of Ethernet cards (RoCE)
are ignored, because most of them have other traffic. IP over InfiniBand changes the same counters, so NCCL's use
of sockets on such an interface is not detected.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/sys/class/infiniband")
COUNTERS = ("port_xmit_data", "port_rcv_data")  # in units of 4 bytes
FULL = 2**32 - 1  # a saturated 32-bit counter, on old cards
LITTLE = 2**18  # 1 MiB; the traffic of a subnet manager is less
AFTER = 60.0  # seconds


def read(root: Path = ROOT) -> dict[str, int]:
    """Return the traffic of each active InfiniBand port, such as mlx5_0:1, in units of 4 bytes."""
    found = {}
    for port in sorted(root.glob("*/ports/*")):
        try:
            active = (port / "state").read_text().startswith("4:")
            layer = (port / "link_layer").read_text().strip()
            moved = [int((port / "counters" / name).read_text()) for name in COUNTERS]
        except (OSError, ValueError):  # EINVAL for a counter that the card does not have
            continue
        if active and layer == "InfiniBand" and FULL not in moved:
            found[f"{port.parent.parent.name}:{port.name}"] = sum(moved)
    return found


def idle_ports(before: dict[str, int], after: dict[str, int]) -> int:
    """Return the number of ports that were active all the time with almost no traffic."""
    return sum(1 for port, moved in before.items() if port in after and 0 <= after[port] - moved < LITTLE)


class Ports:
    """The ports of this machine in the first minute of training."""

    def __init__(self, watched: bool, root: Path = ROOT) -> None:
        """`watched`: whether this rank checks the ports, one on each of several machines."""
        self._root, self._since = root, time.monotonic()
        self._before = read(root) if watched else {}

    def check(self) -> tuple[float, float]:
        """Return the number of idle ports and of all ports, once, after the first minute; else zeros."""
        if not self._before or time.monotonic() - self._since < AFTER:
            return 0.0, 0.0
        before, self._before = self._before, {}
        return float(idle_ports(before, read(self._root))), float(len(before))


def warning(nodes: Sequence[str], ports: Sequence[tuple[float, float]]) -> str:
    """Return a warning, "" if no port was idle. `nodes`: node name by rank; `ports`: result of `check` by rank."""
    where = ", ".join(dict.fromkeys(node for node, (idle, _) in zip(nodes, ports, strict=True) if idle))
    idle, active = (int(sum(each)) for each in zip(*ports, strict=True))
    if not idle:
        return ""
    return (
        f"{idle} of {active} active InfiniBand ports had no traffic in the first minute (on {where}); NCCL may be "
        f"using sockets: run with NCCL_DEBUG=INFO, and check NCCL_IB_DISABLE and NCCL_IB_HCA"
    )
