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
from launcher.run.diagnose import Failure, first_failure, is_victim
from launcher.run.evidence import Evidence, gather
from launcher.run.hang_report import explain
from launcher.run.locate import Attached
from launcher.run.messages import NodeGone, NodeRemoved, clock
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
    lost: str | None  # why not all is known of it


@dataclass(frozen=True)
class Outcome:
    """How a run ended, as result.json has it."""

    run: str
    state: RunState
    failure: Failure | None = None
    nodes: tuple[NodeResult, ...] = ()
    last: Mapping[str, Any] = field(default_factory=dict)  # the last epoch's line of metrics.jsonl
    stopped_by: str | None = None  # user@host who stopped it from elsewhere

    def to_dict(self) -> dict[str, Any]:
        return {**plain(self), "exit_code": self.state.exit_code}


def missing_node(message: NodeGone | NodeRemoved) -> Failure:
    """What a node that is missing at the end means for the run."""
    if isinstance(message, NodeRemoved):
        what, cure = "lost its container: it was removed from outside", "by `docker rm -f`? start again: launcher up"
        return Failure(message.node, None, None, what, cure, "")
    what = f"did not answer any more: no connection since {clock(message.since)}"
    cure = "see that it is up; then end what is left there: launcher down"
    return Failure(message.node, None, None, what, cure, message.reason)


def _unreached(node: str, error: LauncherError) -> Failure:
    return Failure(
        node, None, None, "does not answer", "when it is back, end what is left there: launcher down", str(error)
    )


def uncollected(node: str, error: LauncherError) -> Failure:
    return Failure(node, None, None, "ended, but its files could not be collected", "then: launcher fetch", str(error))


def conclude(
    attached: Attached, states: Mapping[str, ContainerState], missing: Mapping[str, Failure], stopped_by: str | None
) -> Outcome:
    """Weigh the evidence of every node, whose files have been collected.

    states: how the containers ended, by the node's name in the run. missing: nodes of which not all is known.
    stopped_by: who stopped the run from elsewhere; then no end of a container is a failure.
    """
    record = attached.record
    lost = {node: _unreached(node, error) for node, error in attached.unreachable.items()} | dict(missing)
    ended = [node for node in attached.nodes if node.name not in lost and node.name in states]
    logs = run_all_settled([partial(_engine_log, attached, node, states[node.name]) for node in ended])
    evidence: dict[str, Evidence] = {}
    for node, log in zip(ended, logs, strict=True):
        if isinstance(log, LauncherError):
            lost[node.name] = uncollected(node.name, log)
        else:
            evidence[node.name] = gather(record.paths.root, node, states[node.name], log)
    failure = first_failure(list(evidence.values()))
    if lost and (failure is None or failure.exit_code == 0 or is_victim(evidence[failure.node])):
        failure = next(iter(lost.values()))
    done = attached.may_lose and any(state.exit_code == 0 for state in states.values())
    if failure is not None and failure.node in evidence and not done and stopped_by is None:
        failure = explain(failure, attached, list(evidence.values()))
    if stopped_by is not None:
        failure, state = None, RunState.STOPPED
    elif done:  # without the nodes that were lost
        failure, state = None, RunState.DONE
    elif failure is None:
        state = RunState.DONE
    else:  # a node whose files are missing has not failed by that
        failed = any(one.exit_code for one in states.values()) or len(states) < len(attached.nodes)
        state = RunState.FAILED if failed else RunState.LOST
    return Outcome(
        run=record.run,
        state=state,
        failure=failure,
        nodes=tuple(
            _node_result(node, states.get(node.name), evidence.get(node.name), lost.get(node.name), failure)
            for node in record.nodes()
            if node in attached.nodes or node.name in lost
        ),
        last=last_epoch(record.paths.metrics),
        stopped_by=stopped_by,
    )


def _engine_log(attached: Attached, node: NodeOfRun, state: ContainerState) -> bytes:
    """What the engine caught of a container that failed before its entry script could write a log."""
    log = Path(NodePaths(str(attached.record.paths.root), node.name).log)
    if state.exit_code == 0 or (log.is_file() and log.stat().st_size):
        return b""
    return attached.engines[node.name].logs(node.container)


def _node_result(
    node: NodeOfRun, state: ContainerState | None, own: Evidence | None, lost: Failure | None, failure: Failure | None
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
        lost=lost.what if lost else None,
    )


def last_epoch(metrics: Path) -> Mapping[str, Any]:
    """The last line of kind "epoch" of a metrics.jsonl; {} where there is none."""
    last: Mapping[str, Any] = {}
    for line in read_json_lines(metrics):
        last = line if line.get("kind") == "epoch" else last
    return last
