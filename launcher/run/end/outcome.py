"""Determine the outcome of a run from the evidence of all nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher.errors import LauncherError
from launcher.extras import warn_on_error
from launcher.faults.table import IMAGE, NODE, UNLIMITED
from launcher.local_files import read_end
from launcher.model.container import ContainerState
from launcher.model.host import cluster_name
from launcher.model.plan import plain
from launcher.node import trees
from launcher.node.parallel import run_all_catching
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record, read_json_lines
from launcher.run import membership
from launcher.run.end import gradients
from launcher.run.end.diagnose import is_victim
from launcher.run.end.evidence import Evidence, gather, refusal
from launcher.run.end.explain import EndedRun, explain
from launcher.run.end.resumable import left_to_resume
from launcher.run.locate import Attached
from launcher.run.result import Failure, NodeResult, Outcome
from launcher.run.state import BUDGET, REFUSED_CODE, RunState, at_budget, state_of
from launcher.run.watch import messages
from launcher.run.watch.attempts import LIMIT, reasons, stopped_by


def given_up_or_removed(message: messages.NodeGivenUp | messages.NodeRemoved) -> Failure:
    """Return the failure for a node that was given up, or whose container was removed, before the run ended."""
    if isinstance(message, messages.NodeRemoved) and message.folder:
        what = f"lost its output folder {message.folder}: it was removed or locked while the run used it"
        fix = "check that the program does not remove or change this folder; start again: launcher up"
        return Failure(message.node, None, None, what, fix, "")
    if isinstance(message, messages.NodeRemoved):
        what = "lost its container: it was removed by another process"
        fix = "check whether someone ran `docker rm -f`; start again: launcher up"
        return Failure(message.node, None, None, what, fix, "")
    what = f"stopped responding: no connection since {messages.clock(message.since)}"
    fix = "check that it is up; then clean up: launcher down"
    return Failure(message.node, None, None, what, fix, "")


def uncollected(node: str, error: LauncherError) -> Failure:
    return Failure(
        node,
        None,
        None,
        "ended, but its files could not be collected",
        "collect them later: launcher fetch",
        str(error),
    )


def _elsewhere(host: str, attached: Attached) -> Failure:
    if host in attached.not_asked:
        return Failure(host, None, None, "was not asked", f"name all: --nodes {','.join(attached.hosts)}", "")
    return Failure(host, None, None, "has no container of the run any more", "", "")


def conclude(
    attached: Attached,
    states: Mapping[str, ContainerState],
    missing: Mapping[str, Failure],
    stopped_by: str | None,
    warn: Callable[[str], object] = print,
) -> Outcome:
    """Return the outcome of a run. The files of its nodes must have been collected.

    states: how the containers ended, by node name. missing: failures of nodes that were followed, and of
    whose end less is known.
    stopped_by: who stopped the run from elsewhere; then no exit of a container counts as a failure. warn: called with
    each error of what only explains the outcome.
    """
    record, metrics = attached.record, attached.record.paths.metrics
    fix = "once it is reachable again, clean up: launcher down"
    unreachable = {n: Failure(n, None, None, "is unreachable", fix, str(e)) for n, e in attached.unreachable.items()}
    all_missing = unreachable | dict(missing) | {host: _elsewhere(host, attached) for host in attached.elsewhere}
    ended = [node for node in attached.nodes if node.name not in all_missing and node.name in states]
    gathered = run_all_catching([partial(_gather, attached, node, states[node.name], warn) for node in ended])
    evidence: dict[str, Evidence] = {}
    for node, found in zip(ended, gathered, strict=True):
        if isinstance(found, LauncherError):
            all_missing[node.name] = uncollected(node.name, found)
        else:
            evidence[node.name] = found
    budget = stopped_by is None and any(own.budget for own in evidence.values())
    state = state_of(
        at_budget(states.values(), budget),
        attached.size,
        min_nodes=record.min_nodes,
        removed=sum(node.name not in states for node in attached.nodes),
        incomplete=bool(all_missing),
        stopped=stopped_by is not None,
    )
    failure: Failure | None = None
    resume: str | None = None
    if state not in (RunState.DONE, RunState.STOPPED):  # it may have no missing node
        clocks = warn_on_error(
            "whether clocks differ is not known", partial(clocks_ahead, attached, evidence), dict[str, float](), warn
        )
        evidence = {name: replace(own, ahead=clocks.get(name, 0.0)) for name, own in evidence.items()}
        known = warn_on_error(
            "what is known of the run could not be read", partial(_of_run, record), dict[str, str](), warn
        )
        failure = explain(EndedRun([*evidence.values()], all_missing, known), attached, warn)
    if failure is not None:
        left = partial(left_to_resume, failure, attached)
        resume = warn_on_error("the last checkpoint is not known", left, None, warn)
    victims = warn_on_error(
        "which nodes are victims is not known", partial(_victims, evidence, failure), set[str](), warn
    )
    return Outcome(
        run=record.run,
        state=state,
        failure=failure,
        nodes=tuple(
            _node_result(node, states.get(name), evidence.get(name), all_missing.get(name), victim=name in victims)
            for name, node in ((node.name, node) for node in record.nodes())
            if node in attached.nodes or name in all_missing
        ),
        last=warn_on_error(
            "the metrics are left out of the result", lambda: plain(last_epoch(metrics, or_step=budget)), {}, warn
        ),
        stopped_by=stopped_by,
        gradients=warn_on_error("how the gradients travelled is not known", partial(gradients.line, record), "", warn),
        apart=warn_on_error(
            "whether the ranks trained together is not known", partial(_apart, record, state), "", warn
        ),
        resume=resume,
        ended_by=BUDGET if budget and state is RunState.DONE else None,
    )


def failed_before(attached: Attached, warn: Callable[[str], object] = print) -> Failure | None:
    """Return why a node had failed by itself while others still ran, which a user has stopped since; None if none had.

    With min_nodes the run had gone on without it. The files of the nodes must have been collected. warn: as for
    `conclude`.
    """
    record, states = attached.record, attached.states
    if record.min_nodes:
        return None
    over = [node for node in attached.nodes if node.name in states and states[node.name].phase.ended]
    if not any(states[node.name].exit_code for node in over):
        return None
    evidence = [_gather(attached, node, states[node.name], warn) for node in over if not _was_stopped(record, node)]
    run = EndedRun(evidence, known=_of_run(record))
    if run.blamed is None or is_victim(run.blamed) or any(own.budget for own in evidence):
        return None
    return explain(run, attached, warn)


def _was_stopped(record: Record, node: NodeOfRun) -> bool:
    """Whether a user has stopped its last attempt, by the collected files."""
    return stopped_by(read_end(NodePaths(str(record.paths.root), node.name).attempts, LIMIT)) is not None


def clocks_ahead(attached: Attached, nodes: Collection[str]) -> dict[str, float]:
    """Return by how many seconds the clock of each node is ahead of this machine's, if that is more than the error."""
    engines = {attached.engines[name].host: attached.engines[name] for name in nodes}
    if len(engines) < 2:  # a machine, or a cluster, whose login machine says nothing of the others
        return {}
    read = dict(
        zip(engines, run_all_catching([partial(trees.clock, e.machine) for e in engines.values()]), strict=True)
    )
    known = {host: each for host, each in read.items() if isinstance(each, trees.NodeClock)}
    ahead = {host: clock.offset for host, clock in known.items() if abs(clock.offset) > clock.error}
    return {name: ahead[host] for name in nodes if (host := attached.engines[name].host) in ahead}


def _apart(record: Record, state: RunState) -> str:
    """Return that the ranks of a successful run did not train together, or ""."""
    if state is not RunState.DONE or record.is_command or record.min_nodes:
        return ""
    return membership.apart(record.nodes(), membership.collected(record.paths.root, record.nodes()))


def _of_run(record: Record) -> dict[str, str]:
    """Return what is known of the run, for faults.lookup.cause_of_output."""
    known = {"port": str(record.port)} if record.port else {}
    if any(cluster_name(node.host) for node in record.nodes()):
        return known  # its image cannot be changed by the job file
    known["place"] = IMAGE if record.traits.has_images else NODE
    with contextlib.suppress(LookupError, TypeError, ValueError):  # rebuilt from labels, without the plan
        specs = [record.container(node.rank) for node in record.nodes()]
        known["output"] = str(specs[0]["layout"]["output"])
        if all(dict(spec["ulimits"]).get("memlock") == -1 for spec in specs):
            known["memlock"] = UNLIMITED
    return known


def _gather(attached: Attached, node: NodeOfRun, state: ContainerState, warn: Callable[[str], object]) -> Evidence:
    """Gather the evidence of a node; use the engine's log if the entry script failed before it could write one."""
    root, fallback, refused = attached.record.paths.root, b"", b""
    log, ask = Path(NodePaths(str(root), node.name).log), partial(attached.engines[node.name].logs, node.container)
    if state.exit_code != 0 and not (log.is_file() and log.stat().st_size):
        fallback = ask()
    elif state.exit_code == REFUSED_CODE:
        unknown = f"whether {node.name} was started again is not known"
        refused = refusal(warn_on_error(unknown, ask, b"", warn), node.name)
    read, nothing = partial(gather, root, node, state, fallback, refused), Evidence(node, state, "", None, {})
    return warn_on_error(f"the logs of {node.name} could not be read", read, nothing, warn)


def _victims(evidence: Mapping[str, Evidence], failure: Failure | None) -> set[str]:
    """Return the nodes that ended because of that of the failure."""
    others = {name: own for name, own in evidence.items() if failure is not None and name != failure.node}
    return {name for name, own in others.items() if own.state.exit_code and is_victim(own)}


def _node_result(
    node: NodeOfRun, state: ContainerState | None, own: Evidence | None, missing: Failure | None, *, victim: bool
) -> NodeResult:
    why = missing.what if missing else None
    if state is None:
        return NodeResult(node.name, node.rank, lost=why)
    return NodeResult(
        node=node.name,
        rank=node.rank,
        exit_code=state.exit_code,
        oom_killed=own.out_of_memory if own else state.oom_killed,
        restarts=max(0, len(own.attempts) - 1) if own else state.restarts,
        restarted=tuple(reasons(own.attempts)) if own else (),
        started=state.started,
        finished=state.finished,
        victim=victim,
        lost=why,
    )


def last_epoch(metrics: Path, *, or_step: bool = False) -> Mapping[str, Any]:
    """Return the last line of kind "epoch" in a metrics.jsonl, or {}. or_step: without an epoch, that of a step."""
    epoch: Mapping[str, Any] = {}
    step: Mapping[str, Any] = {}
    for line in read_json_lines(metrics):
        kind = line.get("kind", "step")
        epoch, step = (line if kind == "epoch" else epoch), (line if kind == "step" else step)
    return epoch or (step if or_step else {})
