"""The line that says how a run's gradients travel between its nodes: with GPUs NCCL's own words, else from the plan,
once its ranks have joined a process group.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.faults import transport
from launcher.local_files import open_regular
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record
from launcher.run import membership
from launcher.run.membership import Joined
from launcher.run.watch import attempts

MOST = 256 << 10  # bytes read of a process's log: its start


def line(record: Record, logs: Mapping[str, str] | None = None, groups: Mapping[str, Joined] | None = None) -> str:
    """Return the line, or "" while it is not known, and if nothing travels between machines.

    logs: of NCCL on each node; groups: what its ranks have joined. None: those that were collected here.
    """
    nodes = record.nodes()
    if len({node.host for node in nodes}) < 2:
        return ""
    specs = {node.name: record.container(node.rank) for node in nodes}
    if not any(spec.get("gpus") for spec in specs.values()):
        seen = membership.collected(record.paths.root, nodes) if groups is None else groups
        if record.is_command or not membership.together(nodes, seen, record.min_nodes or 0):
            return ""
        return _gloo(record, nodes, {name: spec.get("env", {}) for name, spec in specs.items()})
    texts = collected(record.paths.root, nodes) if logs is None else logs
    found = {node: transport.parse(text) for node, text in texts.items() if text}
    enough = len(found) >= (record.min_nodes or len(nodes))
    return transport.sentence(found, record.wires()) if enough and transport.settled(found) else ""


def _gloo(record: Record, nodes: Sequence[NodeOfRun], env: Mapping[str, Mapping[str, object]]) -> str:
    """Return `gradients: TCP (gloo) on eth0 (10.0.0.1, 10.0.0.2)`, "" if the plan is not known."""
    planned: dict[str, list[str]] = {}
    known = record.interfaces()
    for node in nodes:
        chosen = env[node.name].get("GLOO_SOCKET_IFNAME")
        if not isinstance(chosen, str) or node.rank not in known:
            return ""
        interface, address = known[node.rank]
        own = planned.setdefault(chosen, [])
        if chosen == interface:  # else the job has chosen another one
            own.append(address)
    shown = [f"{name} ({transport.shortened(own)})" if own else name for name, own in planned.items()]
    return f"gradients: TCP (gloo) on {transport.shortened(shown)}"


def collected(root: Path, nodes: Sequence[NodeOfRun]) -> dict[str, str]:
    """Return NCCL's logs of each node's last attempt, one after the other, from the collected files."""
    files: list[Path] = []
    with suppress(OSError):
        files = sorted((root / "logs").iterdir())
    return {node.name: "\n".join(_of_node(root, node, files)) for node in nodes}


def _of_node(root: Path, node: NodeOfRun, files: Sequence[Path]) -> list[str]:
    own = NodePaths(str(root), node.name)
    since, found = attempts.started(root, node), []
    for path in files:
        if re.fullmatch(own.nccl_names, path.name):
            with suppress(OSError), open_regular(path) as file:
                if os.fstat(file.fileno()).st_mtime >= since - 1:  # since: in whole seconds
                    found.append(file.read(MOST).decode("utf-8", "replace"))
    return found
