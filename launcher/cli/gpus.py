"""GPUs and their users, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from launcher.model.facts import Gpu, NodeFacts
from launcher.model.plan import plain
from launcher.planning.gpu_faults import broken
from launcher.planning.gpus import devices, user


def table(nodes: Sequence[NodeFacts]) -> Table:
    """Return a row for each GPU, or for each MIG instance. The last column wraps if the terminal is narrow."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("node", "GPU", "model", "memory"):
        found.add_column(name, no_wrap=True, overflow="ellipsis")
    found.add_column("in use by", overflow="fold")
    for node in nodes:
        usable = devices(node)
        for gpu in sorted(node.gpus, key=lambda gpu: gpu.index):
            model, used = gpu.name.removeprefix("NVIDIA "), _memory(gpu)
            parts = [(device.name.removeprefix("GPU "), user(node, device)) for device in usable if device.gpu is gpu]
            for name, who in parts or [(str(gpu.index), broken(gpu) or "MIG mode, without instances")]:
                found.add_row(*map(Text, (node.name, name, model, used, who)))
    return found


def _memory(gpu: Gpu) -> str:
    if gpu.shared:
        return f"{gpu.used_mib / 1024:.0f}/{gpu.memory_mib / 1024:.0f} GiB shared" if gpu.used_mib else "shared"
    return f"{gpu.used_mib / 1024:.1f}/{gpu.memory_mib / 1024:.0f} GiB"


def rows(nodes: Sequence[NodeFacts]) -> list[dict[str, Any]]:
    """Return the same for programs: all known properties of each GPU, and the runs that hold it."""
    return [
        {
            "node": node.name,
            **plain(gpu),
            "runs": [claim.run for claim in node.claims if claim.uuid in (gpu.uuid, *(i.uuid for i in gpu.instances))],
        }
        for node in nodes
        for gpu in node.gpus
    ]
