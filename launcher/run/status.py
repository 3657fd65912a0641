"""A run as its nodes show it now: states, restarts, how far it is, how busy its machines are. All nodes at once."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from launcher.errors import LauncherError
from launcher.logs.lines import Lines
from launcher.model import labels
from launcher.model.container import ContainerState
from launcher.model.plan import plain
from launcher.node.engine import Engine
from launcher.node.parallel import run_all_settled, run_both
from launcher.records.measured import TrainingProgress, training_progress
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun
from launcher.run import attempts, utilization
from launcher.run.locate import Attached
from launcher.run.messages import fields
from launcher.run.state import of_containers
from launcher.run.utilization import Utilization

TAIL = 8192  # bytes of a log or of the metrics that hold their last lines
LIMIT = 20.0  # seconds for one node's answer
# One round trip for all that a node has beside its container. $1 stands before each part and is a random word, so that
# nothing that a program printed is taken for it. $2: log, $3: attempts, $4: metrics, $5: yes where it still runs.
_SCRIPT = f"""
echo "$1"; tail -c {TAIL} "$2" 2>/dev/null
echo; echo "$1"; head -c {attempts.LIMIT} "$3" 2>/dev/null
echo; echo "$1"; tail -c {TAIL} "$4" 2>/dev/null
echo; echo "$1"
if [ "$5" = yes ]; then
{utilization.SCRIPT}
fi
"""


@dataclass(frozen=True)
class NodeStatus:
    """One node. None, empty or 0 where it is not known: of a node that does not answer, only the first three are.

    A container that was removed has what was written down of it when the run ended.
    """

    node: str
    state: str  # its container's phase, "removed" or "unreachable"
    reason: str | None = None  # why it is unreachable
    host: str = ""
    node_rank: int | None = None
    ranks: tuple[int, int] | None = None  # global ranks of its workers, first and last
    exit_code: int | None = None
    oom_killed: bool = False
    restarts: int = 0
    restarted: tuple[str, ...] = ()  # why each restart was needed
    age: float | None = None  # seconds
    gpus: tuple[str, ...] = ()  # UUIDs
    container: str = ""
    use: Utilization | None = None
    last: str = ""  # the last line that it printed


@dataclass(frozen=True)
class RunStatus:
    """What `launcher status` shows."""

    run: str
    state: str
    progress: TrainingProgress | None
    nodes: tuple[NodeStatus, ...]
    result: Mapping[str, Any] | None  # the record's result.json

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed", "stopped", "lost", "removed")

    def to_json(self) -> str:
        """`progress` is the latest line of the metrics, as the trainer wrote it, with eta (seconds) added."""
        progress = {} if self.progress is None else {**self.progress.last, "eta": self.progress.eta}
        shown = {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return json.dumps(shown | {"progress": progress}, indent=2)


@dataclass(frozen=True)
class _Answer:
    """One node: its container, None where that was removed, and what there is beside it."""

    state: ContainerState | None
    attempts: tuple[attempts.Attempt, ...]
    last: str
    metrics: bytes
    use: Utilization | None


def run_status(attached: Attached, *, again: bool = False) -> RunStatus:
    """A node that does not answer is `unreachable`, with the reason.

    again: the containers are listed anew; else they are as `attached` was told a moment ago.
    """
    found = run_all_settled([partial(_ask, attached, node, again=again) for node in attached.nodes])
    answers = {node.name: one for node, one in zip(attached.nodes, found, strict=True) if isinstance(one, _Answer)}
    lost = dict(attached.unreachable)
    lost |= {n.name: one for n, one in zip(attached.nodes, found, strict=True) if isinstance(one, LauncherError)}
    result = attached.record.result()
    states = [one.state for one in answers.values() if one.state is not None]
    state = of_containers(states, len(attached.nodes)).value if states else "removed"
    if result is not None and state in ("removed", "done", "failed", "lost"):
        state = str(result["state"])
    ends = {str(row.get("node")): row for row in (result or {}).get("nodes", [])}
    return RunStatus(
        run=attached.record.run,
        state=state,
        progress=_progress(attached.nodes, answers),
        nodes=(
            *(_node(n, answers[n.name], ends.get(n.name, {})) for n in attached.nodes if n.name in answers),
            *(NodeStatus(name, "unreachable", str(error)) for name, error in lost.items()),
        ),
        result=result,
    )


def _ask(attached: Attached, node: NodeOfRun, *, again: bool) -> _Answer:
    """The container's state and all that is beside it, at the same time."""
    engine, known = attached.engines[node.name], attached.states.get(node.name)
    paths = NodePaths(node.output, node.name)
    runs = known is not None and not known.phase.ended
    word = secrets.token_hex(16)
    arguments = (word, paths.log, paths.attempts, paths.metrics, "yes" if runs else "no")
    state, said = run_both(
        lambda: _state(engine, attached.record.run, node.name) if again else known,
        lambda: engine.sh(_SCRIPT, *arguments, timeout=LIMIT),
    )
    parts = said.split(f"{word}\n".encode())[1:]
    log, started, metrics, use = [*parts, *[b""] * 4][:4]
    uuids = () if state is None else _gpus(state)
    return _Answer(
        state, attempts.parse(started), _last_line(log), metrics, utilization.parse(use, uuids) if runs else None
    )


def _state(engine: Engine, run: str, node: str) -> ContainerState | None:
    return next(iter(engine.list({labels.RUN: run, labels.NODE: node, labels.PURPOSE: "run"})), None)


def _node(node: NodeOfRun, seen: _Answer, end: Mapping[str, Any]) -> NodeStatus:
    """end: what was written down of the node when the run ended, for when its container is no longer there."""
    state = seen.state
    row = NodeStatus(node.name, "removed", None, node.host, node.rank, (node.ranks.start, node.ranks.stop - 1))
    if state is None:
        kept = ("exit_code", "oom_killed", "restarts", "restarted")
        return dataclasses.replace(row, **{key: end[key] for key in kept if end.get(key) is not None})
    until = state.finished if state.phase.ended and state.finished else time.time()
    return dataclasses.replace(
        row,
        state=state.phase.value,
        exit_code=state.exit_code,
        oom_killed=state.oom_killed,
        restarts=max(0, len(seen.attempts) - 1),
        restarted=tuple(attempts.reasons(seen.attempts)),
        age=round(until - state.started, 1) if state.started else None,
        gpus=_gpus(state),
        container=state.name,
        use=seen.use,
        last=seen.last,
    )


def _gpus(state: ContainerState) -> tuple[str, ...]:
    return tuple(uuid for uuid in state.labels.get(labels.GPUS, "").split(labels.SPLIT) if uuid)


def _progress(nodes: tuple[NodeOfRun, ...], answers: Mapping[str, _Answer]) -> TrainingProgress | None:
    """From the end of the master's metrics."""
    if not nodes or nodes[0].rank != 0 or nodes[0].name not in answers:
        return None
    lines = [fields(line) for line in answers[nodes[0].name].metrics.splitlines()]
    return training_progress([line for line in lines if line and line.get("kind") == "step"])


def _last_line(log: bytes) -> str:
    """As `logs` would show it; "" where nothing was printed."""
    lines = Lines()
    shown = [*lines.feed(log), *lines.end()]
    return next((line.strip() for line in reversed(shown) if line.strip()), "")
