"""How busy a node is at this moment: its GPUs and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MAX_DIGITS = 15
SCRIPT = """
grep -E '^Mem(Total|Available):' /proc/meminfo
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=uuid,utilization.gpu,memory.used,memory.total --format=csv,noheader,nounits
fi
"""


@dataclass(frozen=True)
class GpuUtilization:
    """busy: percent of the last second or so; memory in MiB. None where the driver does not report it."""

    uuid: str
    busy: int | None
    memory: int | None
    memory_total: int | None


@dataclass(frozen=True)
class Utilization:
    """memory and memory_total: the node's own, in bytes; 0 where unknown."""

    gpus: tuple[GpuUtilization, ...]
    memory: int
    memory_total: int


def parse(text: bytes, uuids: Sequence[str]) -> Utilization:
    """From what SCRIPT printed, of these GPUs. Other lines (of a login shell, an error of the driver) are ignored."""
    memory: dict[str, int] = {}
    gpus: dict[str, GpuUtilization] = {}
    for line in text.decode("utf-8", "replace").splitlines():
        name, colon, value = line.partition(":")
        if colon and name in ("MemTotal", "MemAvailable"):
            memory[name] = 1024 * (_number(value.split()[0] if value.split() else "") or 0)
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[0] in uuids:
            gpus[cells[0]] = GpuUtilization(cells[0], *(_number(cell) for cell in cells[1:]))
    total = memory.get("MemTotal", 0)
    free = min(total, memory.get("MemAvailable", total))
    return Utilization(tuple(gpus[uuid] for uuid in uuids if uuid in gpus), total - free, total)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None
