"""Determine the outcome of a run from the evidence of all nodes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from launcher.container_scripts.words import reason
from launcher.errors import LauncherError
from launcher.extras import extra
from launcher.faults import disk
from launcher.faults.table import IMAGE, NODE, NOT_EXECUTABLE, UNLIMITED
from launcher.hangs import report
from launcher.model.container import ContainerState
from launcher.model.host import cluster_name
from launcher.model.plan import plain
from launcher.model.sizes import size_text
from launcher.node import trees
from launcher.node.parallel import run_all_settled
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, Record, read_json_lines
from launcher.run import membership
from launcher.run.end import gradients
from launcher.run.end.diagnose import first_failure, is_victim
from launcher.run.end.evidence import Evidence, collective_failed, gather
from launcher.run.end.left_out import missing_here
from launcher.run.end.resumable import continued, restarted
from launcher.run.end.stop import runs_there
from launcher.run.locate import Attached
from launcher.run.result import Failure, NodeResult, Outcome
from launcher.run.state import BUDGET, HANG_CODE, TIMEOUT_CODE, RunState, at_budget, state_of
from launcher.run.watch import messages
from launcher.run.watch.attempts import reasons

# of Python's error, in the program's output
_EXISTS = re.compile(r"FileExistsError: \[Errno 17\] [^:\n]+: '(?:/dev/shm)?/([^/'\n]{1,255})'")
_CLEAN = "what runs of this folder left: launcher clean --shared-memory"
FULL = 1 << 20  # bytes: a disk with less room is full


def lost_node(message: messages.NodeGone | messages.NodeRemoved) -> Failure:
    """Return the failure for a node that was lost before the run ended."""
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


def unrecorded(node: str) -> Failure:
    what = "ended without a record of its exit code, so it is unknown whether its program was successful"
    return Failure(node, None, None, what, "before you use its results, check its output: launcher logs", "")


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

    states: how the containers ended, by node name. missing: failures of nodes with incomplete information.
    stopped_by: who stopped the run from elsewhere; then no exit of a container counts as a failure. warn: called with
    each error of what only explains the outcome.
    """
    record, metrics = attached.record, attached.record.paths.metrics
    fix = "once it is reachable again, clean up: launcher down"
    silent = {n: Failure(n, None, None, "is unreachable", fix, str(e)) for n, e in attached.unreachable.items()}
    lost = silent | dict(missing) | {host: _elsewhere(host, attached) for host in attached.elsewhere}
    ended = [node for node in attached.nodes if node.name not in lost and node.name in states]
    gathered = run_all_settled([partial(_gather, attached, node, states[node.name], warn) for node in ended])
    evidence: dict[str, Evidence] = {}
    for node, found in zip(ended, gathered, strict=True):
        if isinstance(found, LauncherError):
            lost[node.name] = uncollected(node.name, found)
        else:
            evidence[node.name] = found
    budget = stopped_by is None and any(own.budget for own in evidence.values())
    state = state_of(
        at_budget(states.values(), budget),
        attached.size,
        min_nodes=record.min_nodes,
        gone=sum(node.name not in states for node in attached.nodes),
        incomplete=bool(lost),
        stopped=stopped_by is not None,
    )
    failure: Failure | None = None
    resume: str | None = None
    if state not in (RunState.DONE, RunState.STOPPED):  # possibly without lost nodes
        clocks = extra(
            "whether clocks differ is not known", partial(clocks_ahead, attached, evidence), dict[str, float](), warn
        )
        evidence = {name: replace(own, ahead=clocks.get(name, 0.0)) for name, own in evidence.items()}
        why = partial(_failure, attached, states, evidence, lost, warn)
        failure = extra("why the run failed could not be read", why, _plainly(evidence), warn)
    if failure is not None:
        continues, alone = partial(continued, failure, attached), (failure, resume)
        failure, resume = extra("the last checkpoint is not known", continues, alone, warn)
    return Outcome(
        run=record.run,
        state=state,
        failure=failure,
        nodes=tuple(
            _node_result(node, states.get(node.name), evidence.get(node.name), lost.get(node.name), failure)
            for node in record.nodes()
            if node in attached.nodes or node.name in lost
        ),
        last=extra(
            "the metrics are left out of the result", lambda: plain(last_epoch(metrics, or_step=budget)), {}, warn
        ),
        stopped_by=stopped_by,
        gradients=extra("how the gradients travelled is not known", partial(gradients.line, record), "", warn),
        apart=extra("whether the ranks trained together is not known", partial(_apart, record, state), "", warn),
        resume=resume,
        ended_by=BUDGET if budget and state is RunState.DONE else None,
    )


def clocks_ahead(attached: Attached, nodes: Collection[str]) -> dict[str, float]:
    """Return by how many seconds the clock of each node is ahead of this machine's, if that is more than the error."""
    engines = {attached.engines[name].host: attached.engines[name] for name in nodes}
    if len(engines) < 2:  # a machine, or a cluster, whose login machine says nothing of the others
        return {}
    read = dict(zip(engines, run_all_settled([partial(trees.clock, e.machine) for e in engines.values()]), strict=True))
    known = {host: each for host, each in read.items() if isinstance(each, trees.NodeClock)}
    ahead = {host: clock.offset for host, clock in known.items() if abs(clock.offset) > clock.error}
    return {name: ahead[host] for name in nodes if (host := attached.engines[name].host) in ahead}


def _apart(record: Record, state: RunState) -> str:
    """Return that the ranks of a successful run did not train together, or ""."""
    if state is not RunState.DONE or record.is_command or record.min_nodes:
        return ""
    return membership.apart(record.nodes(), membership.collected(record.paths.root, record.nodes()))


def _failure(
    attached: Attached,
    states: Mapping[str, ContainerState],
    evidence: Mapping[str, Evidence],
    lost: Mapping[str, Failure],
    warn: Callable[[str], object],
) -> Failure | None:
    """Return why a run failed: the first failure, with what is known beyond the evidence of its node."""
    record = attached.record
    failure = first_failure(list(evidence.values()), _of_run(record))
    unknown = [name for name in evidence if states[name].exit_code is None]
    if failure is None and unknown:
        failure = unrecorded(unknown[0])
    if lost and (failure is None or failure.exit_code == 0 or is_victim(evidence[failure.node])):
        failure = next(iter(lost.values()))
    if failure is None or failure.node not in evidence:
        return failure
    collectives = partial(_name_collectives, failure, attached, list(evidence.values()))
    failure = extra("what the ranks waited for is not known", collectives, failure, warn)
    failure = extra("whether a disk is full is not known", partial(_name_disk, failure, attached), failure, warn)
    missed = partial(missing_here, failure.words, record, evidence[failure.node].node.rank)
    if hint := extra("whether a file was left out of the code is not known", missed, "", warn):
        failure = replace(failure, cure=hint)
    leftover = partial(_name_leftover, failure, attached, states[failure.node].started)
    failure = extra("what is left in shared memory is not known", leftover, failure, warn)
    reboot = extra("whether a machine has restarted is not known", partial(restarted, attached, states), None, warn)
    return reboot if reboot and (reboot.node == failure.node or is_victim(evidence[failure.node])) else failure


def _plainly(evidence: Mapping[str, Evidence]) -> Failure | None:
    """Return the first node that failed, without a reason."""
    failed = [(name, own.state.exit_code) for name, own in evidence.items() if own.state.exit_code not in (0, None)]
    return next((Failure(name, None, code, f"exited with code {code}", "", "") for name, code in failed), None)


def _of_run(record: Record) -> dict[str, str]:
    """Return what is known of the run, for faults.lookup.of_output."""
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


def _name_collectives(failure: Failure, attached: Attached, evidence: Sequence[Evidence]) -> Failure:
    """Name the collectives and ranks that the ranks wait for, if they recorded them."""
    if failure.exit_code != HANG_CODE and not collective_failed(evidence):
        return failure
    since = {one.node.name: one.last.started for one in evidence}
    if not (files := report.recordings(attached.record.paths.root, since)):
        return failure
    names = {rank: one.node.name for one in evidence for rank in one.node.ranks}
    node = evidence[0].node
    engine, spec = attached.engines[node.name], attached.record.container(node.rank)
    found, what = report.explain(engine, node, spec, files, names), failure.what
    if any(sentence.startswith(report.OTHERS_WAIT) for sentence in found):  # more precise than the stacks
        what = what.partition(f"; {report.OTHERS_WAIT}")[0]
    return replace(failure, what="; ".join([what, *found]))


def _name_disk(failure: Failure, attached: Attached) -> Failure:
    """Name the output folder's disk if it has no room or no inodes, and the program did not name it or left no error
    (its log is on this disk, too), or if it is mounted noexec and an executable file was refused.
    """
    node, full, words = attached.node(failure.node), disk.full(disk.OUTPUT), failure.what
    unnamed = next((text for text in (full.what, disk.full().what) if text in words), "")
    refused = NOT_EXECUTABLE in words
    silent = not reason(failure.words) and not failure.cure and failure.exit_code not in (0, HANG_CODE, TIMEOUT_CODE)
    if not (unnamed or refused or silent):
        return failure
    with contextlib.suppress(LauncherError):
        room = trees.room(attached.engines[node.name].files, node.output)
        found = disk.no_inodes(disk.OUTPUT) if room.inodes == 0 else full if 0 <= room.free < FULL else None
        if refused and room.mounted.noexec:
            what = words.replace(NOT_EXECUTABLE, "cannot be executed: the output folder's disk is mounted noexec")
            cure = failure.cure.partition(", or ")[2] or "start it with its interpreter: command: [bash, FILE]"
            return replace(failure, what=what, cure=f"{cure}; or make ~/.launcher a link to a folder of another disk")
        if found and not refused:
            what = words.replace(unnamed, found.what) if unnamed else f"{words}; {found.what}"
            return replace(failure, what=what, cure=found.fix)
    return failure


def _name_leftover(failure: Failure, attached: Attached, started: float) -> Failure:
    """Name the file that an earlier process left in the machine's shared memory, if the program could not create it."""
    found, node = _EXISTS.search(failure.words), attached.node(failure.node)
    ipc = attached.record.container(node.rank).get("docker", {}).get("ipc", "host")
    if found is None or ipc != "host":
        return failure
    engine = attached.engines[node.name]
    old = [each for each in engine.shared_memory(0.0) if each.changed < started]
    left = next((each for each in old if each.name in (found[1], f"sem.{found[1]}")), None)
    if left is None or runs_there(engine):
        return failure
    what = f"{failure.what}; an earlier process left /dev/shm/{left.name} ({size_text(left.size)}) there"
    return replace(failure, what=what, cure=f"remove it: on {node.name}, rm -r /dev/shm/{left.name}; {_CLEAN}")


def _gather(attached: Attached, node: NodeOfRun, state: ContainerState, warn: Callable[[str], object]) -> Evidence:
    """Gather the evidence of a node; use the engine's log if the entry script failed before it could write one."""
    root, fallback = attached.record.paths.root, b""
    log = Path(NodePaths(str(root), node.name).log)
    if state.exit_code != 0 and not (log.is_file() and log.stat().st_size):
        fallback = attached.engines[node.name].logs(node.container)
    read, nothing = partial(gather, root, node, state, fallback), Evidence(node, state, "", None, {})
    return extra(f"the logs of {node.name} could not be read", read, nothing, warn)


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


def last_epoch(metrics: Path, *, or_step: bool = False) -> Mapping[str, Any]:
    """Return the last line of kind "epoch" in a metrics.jsonl, or {}. or_step: without an epoch, that of a step."""
    epoch: Mapping[str, Any] = {}
    step: Mapping[str, Any] = {}
    for line in read_json_lines(metrics):
        kind = line.get("kind", "step")
        epoch, step = (line if kind == "epoch" else epoch), (line if kind == "step" else step)
    return epoch or (step if or_step else {})
