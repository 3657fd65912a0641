"""A run as its nodes show it now: states, restarts, how far it is, how busy its machines are. All nodes at once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from launcher.errors import LauncherError
from launcher.logs.lines import Lines
from launcher.logs.position import size_of
from launcher.model import labels
from launcher.model.container import ContainerState
from launcher.model.plan import plain
from launcher.node.engine import Files
from launcher.node.parallel import run_all_settled
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun
from launcher.run import attempts, use
from launcher.run.attempts import Attempt
from launcher.run.locate import Attached
from launcher.run.messages import fields
from launcher.run.state import of_containers
from launcher.run.use import Use

_TAIL = 8192  # bytes of a log or of the metrics that hold their last line


@dataclass(frozen=True)
class _Seen:
    """One node: its container, None where that was removed, and what is there beside it."""

    state: ContainerState | None
    attempts: tuple[Attempt, ...] = ()
    use: Use | None = None
    last: str = ""


def look(attached: Attached) -> dict[str, Any]:
    """What `launcher status` prints. A node that stops answering meanwhile is `unreachable`, with the reason."""
    found = run_all_settled([partial(_node, attached, node) for node in attached.nodes])
    seen = {node.name: one for node, one in zip(attached.nodes, found, strict=True) if isinstance(one, _Seen)}
    lost = dict(attached.unreachable)
    lost |= {n.name: one for n, one in zip(attached.nodes, found, strict=True) if isinstance(one, LauncherError)}
    result = attached.record.result()
    states = [one.state for one in seen.values() if one.state is not None]
    state = of_containers(states, len(attached.nodes)).value if states else "removed"
    if result is not None and state in ("removed", "done", "failed", "lost"):
        state = str(result["state"])
    ends = {str(row.get("node")): row for row in (result or {}).get("nodes", [])}
    rows = [_row(node, seen[node.name], ends.get(node.name, {})) for node in attached.nodes if node.name in seen]
    rows += [{"node": name, "state": "unreachable", "reason": str(error)} for name, error in lost.items()]
    return {
        "run": attached.record.run,
        "state": state,
        "progress": _progress(attached),
        "nodes": rows,
        "result": result,
    }


def _node(attached: Attached, node: NodeOfRun) -> _Seen:
    engine = attached.engines[node.name]
    states = engine.list({labels.RUN: attached.record.run, labels.NODE: node.name, labels.PURPOSE: "run"})
    if not states:
        return _Seen(None)
    uuids = [uuid for uuid in states[0].labels.get(labels.GPUS, "").split(labels.SPLIT) if uuid]
    return _Seen(
        states[0],
        attempts.read(engine.files, node.output, node.name),
        None if states[0].phase.ended else use.look(engine, uuids),
        _last_line(engine.files, NodePaths(node.output, node.name).log),
    )


def _row(node: NodeOfRun, seen: _Seen, end: Mapping[str, Any]) -> dict[str, Any]:
    """end: what was written down of the node when the run ended, for when its container is no longer there."""
    state = seen.state
    row: dict[str, Any] = {
        "node": node.name,
        "host": node.host,
        "node_rank": node.rank,
        "ranks": [node.ranks.start, node.ranks.stop - 1],
    }
    if state is None:
        kept = {key: end.get(key) for key in ("exit_code", "oom_killed", "restarts", "restarted")}
        return {**row, "state": "removed", **kept}
    until = state.finished if state.phase.ended and state.finished else time.time()
    return {
        **row,
        "state": state.phase.value,
        "exit_code": state.exit_code,
        "oom_killed": state.oom_killed,
        "restarts": max(0, len(seen.attempts) - 1),
        "restarted": attempts.reasons(seen.attempts),
        "age": round(until - state.started, 1) if state.started else None,
        "gpus": [g for g in state.labels.get(labels.GPUS, "").split(labels.SPLIT) if g],
        "container": state.name,
        "use": plain(seen.use),
        "last": seen.last,
    }


def _progress(attached: Attached) -> Mapping[str, Any]:
    """The last line of kind "step" of the master's metrics; {} where there is none."""
    if not attached.nodes or attached.nodes[0].rank != 0:
        return {}
    master = attached.nodes[0]
    path = NodePaths(master.output, master.name).metrics
    try:
        data = _end_of(attached.engines[master.name].files, path)
    except LauncherError:
        return {}  # its row says that it does not answer
    steps = (found for line in reversed(data.splitlines()) if (found := fields(line)) and found.get("kind") == "step")
    return next(steps, {})


def _last_line(files: Files, path: str) -> str:
    """As `logs` would show it; "" where nothing was printed."""
    lines = Lines()
    shown = [*lines.feed(_end_of(files, path)), *lines.end()]
    return next((line.strip() for line in reversed(shown) if line.strip()), "")


def _end_of(files: Files, path: str) -> bytes:
    size = size_of(files, path)
    return files.read(path, max(0, size - _TAIL), _TAIL) if size else b""
