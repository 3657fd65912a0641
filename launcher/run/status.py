"""Current status of a run: states, restarts, progress and utilization. Queries all nodes concurrently."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from launcher.errors import LauncherError
from launcher.local_files import parse_object
from launcher.logs.lines import Lines
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import plain
from launcher.node.ends import Ends, EndsWanted
from launcher.node.parallel import run_all_catching, run_both
from launcher.records.measured import TrainingProgress, training_progress
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun
from launcher.run import membership
from launcher.run.end import gradients
from launcher.run.locate import Attached, engine_of
from launcher.run.membership import Joined
from launcher.run.state import BUDGET, RunState, at_budget, recorded_end, state_of
from launcher.run.watch import attempts
from launcher.run.watch.attempts import Generation

NOT_ASKED = "not asked"  # state of a node that --nodes does not name
_MEMORY = re.compile(r"^Mem(Total|Available): +([0-9]{1,15}) kB$", re.MULTILINE)
_NUMBER = re.compile("[0-9]{1,15}")


@dataclass(frozen=True)
class GpuUtilization:
    """busy: percent of about the last second; memory in MiB. None if the driver does not report it."""

    uuid: str
    busy: int | None
    memory: int | None
    memory_total: int | None


@dataclass(frozen=True)
class Utilization:
    """memory and memory_total: RAM of the node, in bytes; 0: unknown."""

    gpus: tuple[GpuUtilization, ...]
    memory: int
    memory_total: int


@dataclass(frozen=True)
class StoppedRank:
    """A rank that has stopped in breakpoint(). waits: for `launcher debug`; else one is connected."""

    rank: int
    waits: bool
    text: str  # to display: "rank 3 on gpu-b waits in train.py:87, breakpoint()"


@dataclass(frozen=True)
class NodeStatus:
    """Status of one node. None, empty or 0: unknown. For a node that is unreachable or was not asked, only the first
    three fields are set.

    If the container was removed, the values recorded at the end of the run are used.
    """

    node: str
    state: str  # its container's phase, "waiting" (a spare), "removed", "unreachable" or NOT_ASKED
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
    last: str = ""  # the last line of its output
    debug: tuple[StoppedRank, ...] = ()
    waits: str = ""  # state of the cluster's job before a process starts: "job 12: PENDING (Resources)"


@dataclass(frozen=True)
class RunStatus:
    """The data of `launcher status`."""

    run: str
    state: str
    progress: TrainingProgress | None
    nodes: tuple[NodeStatus, ...]
    result: Mapping[str, Any] | None  # the record's result.json
    world: Generation | None = None  # newest generation of a job with min_nodes
    started_by: str = ""  # user@host of the caller, and the uid on the node; "" if unknown
    gradients: str = ""  # how they travel between the nodes; "" if unknown
    stopped_by: str = ""  # user@host; "" if unknown
    ended_by: str | None = None  # "budget"
    variant: str = ""  # of its sweep; "": it belongs to none
    not_started: str = ""  # why it was not started, and what to do; "": it was

    @property
    def ended(self) -> bool:
        return RunState(self.state).ended or self.state in (RunState.REMOVED, RunState.ENDED_HERE)

    def to_dict(self) -> dict[str, Any]:
        """`progress` is the trainer's latest line of metrics, with eta (seconds) added."""
        progress = {} if self.progress is None else {**self.progress.last, "eta": self.progress.eta}
        shown = {field.name: plain(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return shown | {"progress": progress}


@dataclass(frozen=True)
class _Answer:
    """Response of a node. state: of its container, None if the container was removed."""

    row: NodeStatus
    state: ContainerState | None
    metrics: bytes  # end of the metrics, from a node that may have rank 0
    generations: tuple[Generation, ...]
    nccl: bytes  # lines of NCCL's logs
    joined: Joined
    stopped_by: str = ""
    budget: bool = False  # it has ended the run at its budget


def run_status(attached: Attached) -> RunStatus:
    """Return the status of a run. Unreachable nodes have the state `unreachable` and a reason."""
    result = attached.record.result()
    rows = (result or {}).get("nodes")
    ends = {str(row.get("node")): row for row in (rows if isinstance(rows, list) else ()) if isinstance(row, dict)}
    groups = _by_engine(attached)
    found = run_all_catching([partial(_query, attached, nodes, ends) for nodes in groups])
    answers = [answer for one in found if not isinstance(one, LauncherError) for answer in one]
    lost = {
        node.name: e for nodes, e in zip(groups, found, strict=True) if isinstance(e, LauncherError) for node in nodes
    }
    states = [a.state for a in answers if a.state is not None]
    unreachable = len(attached.unreachable) + len(lost)
    stopped_by = next((answer.stopped_by for answer in answers if answer.stopped_by), "")
    budget = any(answer.budget for answer in answers)
    state = state_of(
        at_budget(states, budget),
        attached.size,
        min_nodes=attached.record.min_nodes,
        unreachable=unreachable,
        not_asked=len(attached.not_asked),
        stopped=bool(stopped_by),  # by another folder's `down`
        recorded=recorded_end(result),
    )
    seen = bool(states or unreachable)
    generation = attempts.newest({answer.row.node: answer.generations for answer in answers})
    nccl = {answer.row.node: answer.nccl.decode("utf-8", "replace") for answer in answers}
    joined = {answer.row.node: answer.joined for answer in answers}
    metrics = {answer.row.node: answer.metrics for answer in answers if answer.metrics}
    newest_first = [metrics[node] for node in (generation.members if generation else metrics) if node in metrics]
    lines = [parse_object(line) for line in newest_first[0].splitlines()] if newest_first else []
    away = [NodeStatus(name, "unreachable", str(error)) for name, error in {**attached.unreachable, **lost}.items()]
    away += [NodeStatus(host, NOT_ASKED) for host in attached.not_asked]
    return RunStatus(
        run=attached.record.run,
        state=state.value,
        progress=training_progress([line for line in lines if line]),
        nodes=(*(_in_generation(answer.row, generation) for answer in answers), *away),
        world=generation,
        result=result,
        started_by=attached.started_by,
        gradients=str((result or {}).get("gradients", "")) or gradients.line(attached.record, nccl, joined),
        stopped_by=str((result or {}).get("stopped_by") or stopped_by) if state is RunState.STOPPED else "",
        ended_by=(result or {}).get("ended_by") or (BUDGET if budget and state is RunState.DONE else None),
        variant=group.shown if (group := attached.record.group) else "",
        not_started="" if seen else attached.record.why_not_started,
    )


def _by_engine(attached: Attached) -> list[list[NodeOfRun]]:
    """Group the nodes by engine, for one query each: all nodes of a cluster share an engine."""
    groups: dict[str, list[NodeOfRun]] = {}
    for node in attached.nodes:
        groups.setdefault(engine_of(node)[0], []).append(node)
    return [*groups.values()]


def _query(attached: Attached, nodes: Sequence[NodeOfRun], ends: Mapping[str, Mapping[str, Any]]) -> list[_Answer]:
    """Query the nodes of one engine. ends: the recorded results, used for nodes whose container was removed."""
    first, engine = nodes[0], attached.engines[nodes[0].name]
    wanted = {labels.RUN: attached.record.run, labels.PURPOSE: "run"}
    wanted |= {labels.NODE: first.name} if len(nodes) == 1 else {}
    files = {node.name: _wanted(attached, node) for node in nodes}
    listed, printed = run_both(lambda: engine.list(wanted), lambda: engine.ends(first.output, files))
    by_id = {state.id: state for state in listed}
    unseen = (
        [] if all(node.name in attached.states for node in nodes) else [s for s in listed if labels.readable(s.labels)]
    )
    by_node = {state.labels[labels.NODE]: state for state in reversed(unseen)}
    answers = []
    for node in nodes:
        seen = attached.states.get(node.name)
        state = by_id.get(seen.id) if seen else by_node.get(node.name)
        answers.append(_answer(node, state, printed[node.name], ends.get(node.name, {})))
    hangs = "LAUNCHER_HANG_TIMEOUT" in attached.record.container(0).get("env", {})
    if hangs and not attached.record.min_nodes:  # it is rank 0's node that sees the run hang
        return [answer if answer.row.node_rank == 0 else _may_hang(answer) for answer in answers]
    return answers


def _may_hang(answer: _Answer) -> _Answer:
    what = "hang_timeout goes on unless somebody follows the run"
    debug = tuple(replace(one, text=f"{one.text} ({what})") for one in answer.row.debug)
    return replace(answer, row=replace(answer.row, debug=debug))


def _wanted(attached: Attached, node: NodeOfRun) -> EndsWanted:
    paths, seen = NodePaths(node.output, node.name), attached.states.get(node.name)
    may_be_master = node.rank == 0 or attached.record.min_nodes
    runs = seen is not None and not seen.phase.ended
    return EndsWanted(paths.log, paths.attempts, paths.metrics if may_be_master else "", runs, paths.groups)


def _answer(node: NodeOfRun, state: ContainerState | None, printed: Ends, end: Mapping[str, Any]) -> _Answer:
    row = NodeStatus(node.name, "removed", None, node.host, node.rank, (node.ranks.start, node.ranks.stop - 1))
    if state is None:
        kept = ("exit_code", "oom_killed", "restarts", "restarted")
        row = replace(row, **{key: end[key] for key in kept if end.get(key) is not None})
    else:
        until = state.finished if state.phase.ended and state.finished else time.time()
        gpus = labels.read(state.labels).gpus
        tried = attempts.parse(printed.attempts)
        row = replace(
            row,
            state=state.phase.value,
            exit_code=state.exit_code,
            oom_killed=state.oom_killed,
            restarts=max(0, len(tried) - 1),
            restarted=tuple(attempts.reasons(tried)),
            age=round(until - state.started, 1) if state.started else None,
            gpus=gpus,
            container=state.name,
            use=None if printed.machine is None else utilization(printed.machine, gpus),
            waits="" if state.phase.ended else state.error,
            debug=() if state.phase.ended else stopped_ranks(node.name, printed.attempts),
            last=state.error or last_line(printed.log) or last_line(printed.denied),
        )
    stopped_by = attempts.stopped_by(printed.attempts) or ""
    joined = membership.parse(printed.groups, attempts.last_start(printed.attempts))
    generations = attempts.parse_generations(printed.attempts)
    budget = attempts.reached_budget(printed.attempts)
    return _Answer(row, state, printed.metrics, generations, printed.nccl, joined, stopped_by, budget)


def stopped_ranks(node: str, text: bytes) -> tuple[StoppedRank, ...]:
    """Return the ranks that have stopped. text: of the node's attempts file."""
    return tuple(StoppedRank(one.rank, one.waits, one.sentence(node)) for one in attempts.waiting(text))


def utilization(text: bytes, uuids: Sequence[str]) -> Utilization:
    """Parse Ends.machine for these GPUs. Other lines (of a login shell or the driver) are ignored."""
    output = text.decode("utf-8", "replace")
    memory = {name: 1024 * int(size) for name, size in _MEMORY.findall(output)}
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    gpus = {row[0]: GpuUtilization(row[0], *map(_number, row[1:])) for row in rows if len(row) == 4}
    total = memory.get("Total", 0)
    free = min(total, memory.get("Available", total))
    return Utilization(tuple(gpus[uuid] for uuid in uuids if uuid in gpus), total - free, total)


def _number(text: str) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


def _in_generation(row: NodeStatus, generation: Generation | None) -> NodeStatus:
    """Return the row with the node's ranks in the newest generation of a job with min_nodes."""
    if generation is None or row.ranks is None:
        return row
    if row.node not in generation.members:
        state = "waiting" if row.state == Phase.RUNNING.value else row.state
        return replace(row, state=state, node_rank=None, ranks=None)
    rank, workers = generation.members.index(row.node), row.ranks[1] - row.ranks[0] + 1
    return replace(row, node_rank=rank, ranks=(rank * workers, (rank + 1) * workers - 1))


def last_line(log: bytes) -> str:
    """Return the last line as `logs` would show it, or ""."""
    lines = Lines()
    shown = [*lines.feed(log), *lines.end()]
    return next((line.strip() for line in reversed(shown) if line.strip()), "")
