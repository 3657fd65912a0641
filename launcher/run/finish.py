"""The end of a run: the first failure found, everything brought home, the result written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError
from launcher.model.container import ContainerState
from launcher.model.plan import plain
from launcher.node.engine import Engine
from launcher.node.parallel import run_all_settled
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record
from launcher.run.attempts import reasons
from launcher.run.diagnose import Evidence, Failure, first_failure, gather, is_victim
from launcher.run.state import RunState


@dataclass(frozen=True)
class Outcome:
    """How a run ended, as result.json has it."""

    run: str
    state: RunState
    failure: Failure | None = None
    nodes: tuple[Mapping[str, Any], ...] = ()
    last: Mapping[str, Any] = field(default_factory=dict)  # the last epoch's line of metrics.jsonl

    def to_dict(self) -> dict[str, Any]:
        value: dict[str, Any] = plain(self)
        value["exit_code"] = self.state.exit_code
        return value


def conclude(
    engines: Mapping[str, Engine],
    record: Record,
    nodes: Sequence[NodeOfRun],
    states: Mapping[str, ContainerState],
    gone: Mapping[str, str],
    *,
    stopped: bool = False,
) -> Outcome:
    """Weigh the evidence of every node, whose files have been brought here, and write result.json.

    engines, states: by the node's name in the run; states are the ends of the containers. gone: nodes that were given
    up or whose files could not be brought, with the reason.
    """
    lost = dict(gone)
    ended = [node for node in nodes if node.name not in lost and node.name in states]
    logs = run_all_settled([partial(_own_log, engines[n.name], record, n, states[n.name]) for n in ended])
    lost |= {node.name: str(log) for node, log in zip(ended, logs, strict=True) if isinstance(log, LauncherError)}
    evidence = [
        gather(record.paths.root, node, states[node.name], log)
        for node, log in zip(ended, logs, strict=True)
        if not isinstance(log, LauncherError)
    ]
    failure = None if stopped else first_failure(evidence)
    blamed = next((e for e in evidence if failure and e.node.name == failure.node), None)
    if lost and not stopped and (blamed is None or is_victim(blamed)):
        name, reason = next(iter(lost.items()))
        failure = Failure(
            name, None, None, "did not answer any more", "see that it is up; then `launcher status`", reason
        )
    state = _state(failure, lost, stopped=stopped)
    outcome = Outcome(
        run=record.run,
        state=state,
        failure=failure,
        nodes=tuple(_node_result(node, states.get(node.name), evidence, lost, failure) for node in nodes),
        last=last_epoch(record),
    )
    record.finish(outcome.to_dict())
    record.event("ended", state=state.value, failure=failure)
    return outcome


def _own_log(engine: Engine, record: Record, node: NodeOfRun, state: ContainerState) -> bytes:
    """What the engine itself caught of a container that failed before its entry script could write a log."""
    log = Path(NodePaths(str(record.paths.root), node.name).log)
    if state.exit_code == 0 or (log.is_file() and log.stat().st_size):
        return b""
    return engine.logs(node.container)


def _state(failure: Failure | None, lost: Mapping[str, str], *, stopped: bool) -> RunState:
    if stopped:
        return RunState.STOPPED
    if failure is None:
        return RunState.DONE
    return RunState.LOST if failure.node in lost else RunState.FAILED


def _node_result(
    node: NodeOfRun,
    state: ContainerState | None,
    evidence: Sequence[Evidence],
    lost: Mapping[str, str],
    failure: Failure | None,
) -> dict[str, Any]:
    own = next((e for e in evidence if e.node.name == node.name), None)
    return {
        "node": node.name,
        "rank": node.rank,
        "exit_code": state.exit_code if state else None,
        "oom_killed": state.oom_killed if state else None,
        "restarts": max(0, len(own.attempts) - 1) if own else (state.restarts if state else None),
        "restarted": reasons(own.attempts) if own else [],
        "started": state.started if state else None,
        "finished": state.finished if state else None,
        "victim": bool(own and failure and failure.node != node.name and own.state.exit_code and is_victim(own)),
        "lost": lost.get(node.name),
    }


def last_epoch(record: Record) -> Mapping[str, Any]:
    """The last line of kind "epoch" of the run's metrics, as brought over; {} where there is none."""
    if not record.paths.metrics.exists():
        return {}
    return epoch_in(record.paths.metrics.read_text(encoding="utf-8", errors="replace"))


def epoch_in(text: str) -> Mapping[str, Any]:
    """The last line of kind "epoch" in a metrics.jsonl, which is the user's program's to write; {}: there is none."""
    last: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue  # torn by a kill in the middle of a write
        if isinstance(value, dict) and value.get("kind") == "epoch":
            last = value
    return last
