"""A run followed to its end: peers of a failed node are stopped, the evidence of every node is weighed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError
from launcher.model.container import ContainerState
from launcher.model.plan import plain
from launcher.node.parallel import in_background, run_all_settled
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record, read_json_lines
from launcher.run import messages
from launcher.run.attempts import reasons
from launcher.run.diagnose import Failure, first_failure, is_victim
from launcher.run.evidence import Evidence, gather
from launcher.run.follow import Follow
from launcher.run.followed import Followed
from launcher.run.hang_report import explain, unmet
from launcher.run.locate import Attached, Owner
from launcher.run.messages import Message
from launcher.run.state import HANG_CODE, RunState

# A rank that fails takes its peers down within a second or two: torchrun and the communication library see to that.
# Those that still run after PEER_TIMEOUT are stopped, SIGKILL after GRACE: 15 s in all, and HANG_STACKS after a hang.
PEER_TIMEOUT = 3.0
DONE_TIMEOUT = 10.0  # for the nodes of a run that is done, while they tell one another so
GRACE = 10.0
STACKS = 1.0  # seconds for ranks that wait to write down for what
HANG_STACKS = 8.0  # after a hang, where entry.sh waits 5 s for that before it asks for the stacks


@dataclass(frozen=True)
class NodeResult:
    """How a node ended; None where that is not known."""

    node: str
    rank: int
    exit_code: int | None = None
    oom_killed: bool | None = None
    restarts: int | None = None
    restarted: tuple[str, ...] = ()  # why each restart was needed
    started: float | None = None
    finished: float | None = None
    victim: bool = False  # it ended because another node did
    lost: str | None = None  # why not all is known of it


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


def supervise(
    attached: Attached, shown: Sequence[Followed], show: Callable[[Message], None], *, resumed: bool
) -> Outcome:
    """Follow a run until every container has ended. Interrupting this leaves the run alone."""
    states: dict[str, ContainerState] = {}
    missing: dict[str, Failure] = {}
    stopped_by: list[str] = []
    all_ended = threading.Event()
    stopping: Callable[[], None] | None = None
    following = Follow(attached, shown, resumed=resumed)
    try:
        for message in following:
            _record(attached.record, message)
            if isinstance(message, messages.NodeEnded):
                states[message.node] = message.state
            elif isinstance(message, (messages.NodeGone, messages.NodeRemoved)):
                missing[message.node] = _missing(message)
            elif isinstance(message, messages.NodeStopped):
                stopped_by.append(message.by)
            elif isinstance(message, messages.NodeBack):
                stopping = None  # if the run has failed meanwhile, it could not be stopped there
            badly = len(attached.unreachable) + len(missing) + sum(state.exit_code != 0 for state in states.values())
            failed, done = badly > attached.may_lose, attached.is_done(states)
            if failed or stopped_by or done:
                following.over()
            if (failed or done) and stopping is None and attached.owner is not Owner.OTHER:
                timeout = PEER_TIMEOUT if failed else DONE_TIMEOUT
                stop = partial(_stop_peers, attached, following, states, stopped_by, all_ended, timeout)
                stopping = in_background(stop)
            if len(states) + len(missing) >= len(attached.nodes):
                all_ended.set()
            show(message)
        if stopping is not None:
            stopping()
    finally:
        following.close()
    not_collected = {name: _uncollected(name, error) for name, error in following.not_collected.items()}
    outcome = _conclude(attached, states, not_collected | missing, next(iter(stopped_by), None))
    if problem := attached.record.finish(outcome.to_dict()):
        show(messages.NotCollected(problem))
    attached.record.event("ended", state=outcome.state.value, failure=outcome.failure)
    return outcome


def _record(record: Record, message: Message) -> None:
    if isinstance(message, messages.NodeEnded):
        state = message.state
        record.event("node ended", node=message.node, exit_code=state.exit_code, oom_killed=state.oom_killed)
    elif not isinstance(message, (messages.Output, messages.Progress, messages.Tick)):
        record.event(type(message).__name__.replace("Node", "node ").lower(), **asdict(message))


def _stop_peers(
    attached: Attached,
    following: Follow,
    states: Mapping[str, ContainerState],
    stopped_by: Sequence[str],
    all_ended: threading.Event,
    timeout: float,
) -> None:
    """Peers that have not ended by themselves in that time. A stop ends a restart policy: no restart is wanted now.

    Of a run that is done, only those that were away when the others finished, and do not know of it. A user who stops
    the run gives all of its nodes the time for a checkpoint.
    """

    def stop(node: NodeOfRun) -> None:
        engine = attached.engines[node.name]
        try:
            if hung or collective:  # a rank here may be the one that all others waited for
                engine.signal(node.container, "QUIT" if hung else "URG")
                all_ended.wait(HANG_STACKS if hung else STACKS)
            engine.stop(node.container, GRACE)
            attached.record.event("peer stopped", node=node.name)
        except LauncherError as error:
            attached.record.event("peer not stopped", node=node.name, reason=str(error))

    if all_ended.wait(timeout) or stopped_by:
        return
    away = following.left_out() if attached.is_done(states) else None
    left = [node for node in attached.nodes if node.name not in states and (away is None or node.name in away)]
    root = attached.record.paths.root
    ended = [gather(root, node, states[node.name]) for node in attached.nodes if node.name in states]
    hung = any(one.state.exit_code == HANG_CODE for one in ended)
    collective = unmet(ended) or not following.up_to_date
    run_all_settled([partial(stop, node) for node in left])


def _missing(message: messages.NodeGone | messages.NodeRemoved) -> Failure:
    """What a node that is missing at the end means for the run."""
    if isinstance(message, messages.NodeRemoved):
        what, cure = "lost its container: it was removed from outside", "by `docker rm -f`? start again: launcher up"
        return Failure(message.node, None, None, what, cure, "")
    what = f"did not answer any more: no connection since {messages.clock(message.since)}"
    cure = "see that it is up; then end what is left there: launcher down"
    return Failure(message.node, None, None, what, cure, message.reason)


def _uncollected(node: str, error: LauncherError) -> Failure:
    return Failure(node, None, None, "ended, but its files could not be collected", "then: launcher fetch", str(error))


def _conclude(
    attached: Attached, states: Mapping[str, ContainerState], missing: Mapping[str, Failure], stopped_by: str | None
) -> Outcome:
    """Weigh the evidence of every node, whose files have been collected.

    states: how the containers ended, by the node's name in the run. missing: nodes of which not all is known.
    stopped_by: who stopped the run from elsewhere; then no end of a container is a failure.
    """
    record = attached.record
    cure = "when it is back, end what is left there: launcher down"
    silent = {n: Failure(n, None, None, "does not answer", cure, str(e)) for n, e in attached.unreachable.items()}
    lost = silent | dict(missing)
    ended = [node for node in attached.nodes if node.name not in lost and node.name in states]
    gathered = run_all_settled([partial(_gather, attached, node, states[node.name]) for node in ended])
    evidence: dict[str, Evidence] = {}
    for node, found in zip(ended, gathered, strict=True):
        if isinstance(found, LauncherError):
            lost[node.name] = _uncollected(node.name, found)
        else:
            evidence[node.name] = found
    failure = first_failure(list(evidence.values()))
    if lost and (failure is None or failure.exit_code == 0 or is_victim(evidence[failure.node])):
        failure = next(iter(lost.values()))
    if stopped_by is not None:
        failure, state = None, RunState.STOPPED
    elif failure is None or attached.is_done(states):  # maybe without the nodes that were lost
        failure, state = None, RunState.DONE
    else:  # a node whose files are missing has not failed by that
        failed = any(one.exit_code for one in states.values()) or len(states) < len(attached.nodes)
        state = RunState.FAILED if failed else RunState.LOST
        if failure.node in evidence:
            failure = explain(failure, attached, list(evidence.values()))
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


def _gather(attached: Attached, node: NodeOfRun, state: ContainerState) -> Evidence:
    """With what the engine caught of a container that failed before its entry script could write a log."""
    root, caught = attached.record.paths.root, b""
    log = Path(NodePaths(str(root), node.name).log)
    if state.exit_code != 0 and not (log.is_file() and log.stat().st_size):
        caught = attached.engines[node.name].logs(node.container)
    return gather(root, node, state, caught)


def _node_result(
    node: NodeOfRun, state: ContainerState | None, own: Evidence | None, lost: Failure | None, failure: Failure | None
) -> NodeResult:
    why = lost.what if lost else None
    if state is None:
        return NodeResult(node.name, node.rank, lost=why)
    return NodeResult(
        node=node.name,
        rank=node.rank,
        exit_code=state.exit_code,
        oom_killed=state.oom_killed,
        restarts=max(0, len(own.attempts) - 1) if own else state.restarts,
        restarted=tuple(reasons(own.attempts)) if own else (),
        started=state.started,
        finished=state.finished,
        victim=bool(own and failure and failure.node != node.name and state.exit_code and is_victim(own)),
        lost=why,
    )


def last_epoch(metrics: Path) -> Mapping[str, Any]:
    """The last line of kind "epoch" of a metrics.jsonl; {} where there is none."""
    last: Mapping[str, Any] = {}
    for line in read_json_lines(metrics):
        last = line if line.get("kind") == "epoch" else last
    return last
