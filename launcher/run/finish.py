"""The end of a run: the evidence of every node weighed, the first failure found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError
from launcher.model.container import ContainerState
from launcher.model.plan import plain
from launcher.node.parallel import run_all_settled
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, read_json_lines
from launcher.run.attempts import reasons
from launcher.run.diagnose import Evidence, Failure, first_failure, gather, is_victim
from launcher.run.locate import Attached
from launcher.run.state import RunState


@dataclass(frozen=True)
class NodeResult:
    """How a node ended; None where that is not known."""

    node: str
    rank: int
    exit_code: int | None
    oom_killed: bool | None
    restarts: int | None
    restarted: tuple[str, ...]  # why each restart was needed
    started: float | None
    finished: float | None
    victim: bool  # it ended because another node did
    lost: str | None  # why it was given up, or its files could not be collected


@dataclass(frozen=True)
class Outcome:
    """How a run ended, as result.json has it."""

    run: str
    state: RunState
    failure: Failure | None = None
    nodes: tuple[NodeResult, ...] = ()
    last: Mapping[str, Any] = field(default_factory=dict)  # the last epoch's line of metrics.jsonl

    def to_dict(self) -> dict[str, Any]:
        return {**plain(self), "exit_code": self.state.exit_code}


def conclude(attached: Attached, states: Mapping[str, ContainerState], gone: Mapping[str, str]) -> Outcome:
    """Weigh the evidence of every node, whose files have been collected.

    states: how the containers ended, by the node's name in the run. gone: nodes that were given up or whose files could
    not be collected, with the reason.
    """
    record, lost = attached.record, dict(gone)
    ended = [node for node in attached.nodes if node.name not in lost and node.name in states]
    logs = run_all_settled([partial(_engine_log, attached, node, states[node.name]) for node in ended])
    evidence: dict[str, Evidence] = {}
    for node, log in zip(ended, logs, strict=True):
        if isinstance(log, LauncherError):
            lost[node.name] = str(log)
        else:
            evidence[node.name] = gather(record.paths.root, node, states[node.name], log)
    failure = first_failure(list(evidence.values()))
    if lost and (failure is None or is_victim(evidence[failure.node])):
        name, reason = next(iter(lost.items()))
        what, cure = "did not answer any more", "see that it is up; then `launcher status`"
        failure = Failure(name, None, None, what, cure, reason)
    return Outcome(
        run=record.run,
        state=_state(failure, lost),
        failure=failure,
        nodes=tuple(
            _node_result(node, states.get(node.name), evidence.get(node.name), lost.get(node.name), failure)
            for node in attached.nodes
        ),
        last=last_epoch(record.paths.metrics),
    )


def _engine_log(attached: Attached, node: NodeOfRun, state: ContainerState) -> bytes:
    """What the engine caught of a container that failed before its entry script could write a log."""
    log = Path(NodePaths(str(attached.record.paths.root), node.name).log)
    if state.exit_code == 0 or (log.is_file() and log.stat().st_size):
        return b""
    return attached.engines[node.name].logs(node.container)


def _state(failure: Failure | None, lost: Mapping[str, str]) -> RunState:
    if failure is None:
        return RunState.DONE
    return RunState.LOST if failure.node in lost else RunState.FAILED


def _node_result(
    node: NodeOfRun, state: ContainerState | None, own: Evidence | None, lost: str | None, failure: Failure | None
) -> NodeResult:
    return NodeResult(
        node=node.name,
        rank=node.rank,
        exit_code=state.exit_code if state else None,
        oom_killed=state.oom_killed if state else None,
        restarts=max(0, len(own.attempts) - 1) if own else (state.restarts if state else None),
        restarted=tuple(reasons(own.attempts)) if own else (),
        started=state.started if state else None,
        finished=state.finished if state else None,
        victim=bool(own and failure and failure.node != node.name and own.state.exit_code and is_victim(own)),
        lost=lost,
    )


def last_epoch(metrics: Path) -> Mapping[str, Any]:
    """The last line of kind "epoch" of a metrics.jsonl; {} where there is none."""
    last: Mapping[str, Any] = {}
    for line in read_json_lines(metrics):
        last = line if line.get("kind") == "epoch" else last
    return last
