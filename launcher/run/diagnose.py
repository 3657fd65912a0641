"""Find the rank that failed first and why: its own output, and a known cause with a fix. Victims are not blamed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.container_scripts.words import TRACEBACK, VICTIM, last_output, last_traceback
from launcher.node.docker.toolkit import gpu_error
from launcher.run.evidence import Evidence
from launcher.run.known_causes import known_cause
from launcher.run.state import HANG_CODE, SIGKILL_CODE, SIGTERM_CODE, TIMEOUT_CODE

OTHERS_WAIT = "the others wait for"

# In torchrun's report: the rank that failed first, and its exit code, negative if a signal killed it
_ROOT_CAUSE = re.compile(r"Root Cause.*?\brank\s*:\s*(\d+)(?:.*?\bexitcode\s*:\s*(-?\d+))?", re.DOTALL)
# Linux signal numbers, as on the nodes; the caller's system may use others
_NAMES = "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM"
_SIGNALS = {number: f"SIG{name}" for number, name in enumerate(_NAMES.split(), start=1)}

_REPORTED_RANK = re.compile(r"\brank\s*: (\d+)")  # in torchrun's list of the ranks that failed

_IMPORTING = "<frozen importlib._bootstrap>"  # in the stack of a rank that is importing a module
# Stack frames of a rank that waits for others; a collective on GPUs waits in torch.cuda or backward.
_WAITING = re.compile(r"torch/(distributed|autograd|cuda|nn/parallel)/")

_RESUME = "resume from its last checkpoint: launcher up JOB --resume RUN"
_AGAIN = f"{_RESUME}; with `restarts` set, Slurm restarts such a job automatically"
_BY_SLURM = {  # Slurm's job state, and the fix
    "TIMEOUT": f"raise `time` of the cluster, or `timeout` of the job; {_RESUME}",
    "DEADLINE": _RESUME,
    "CANCELLED": _RESUME,
    "OUT_OF_MEMORY": "raise resources.memory, or use fewer loader workers",
    "NODE_FAIL": _AGAIN,
    "BOOT_FAIL": _AGAIN,
    "PREEMPTED": _AGAIN,
}


@dataclass(frozen=True)
class Failure:
    """Why a run failed. `words` is the failing rank's traceback or last lines."""

    node: str
    rank: int | None  # global rank of the worker; None: the node's container as a whole
    exit_code: int | None
    what: str
    cure: str  # the suggested fix; this name is the key in result.json
    words: str


def first_failure(evidence: Sequence[Evidence]) -> Failure | None:
    """Return the failure that caused the others, or None if every container exited with code 0.

    Suspended ranks, out-of-memory kills reported by the engine and time limits come first; then ranks that failed on
    their own, before ranks that only lost a peer; then by time, then by rank. If all ranks only lost a peer, the cause
    is a rank that exited early.
    """
    failed = [e for e in evidence if e.state.exit_code not in (0, None) or e.state.error]
    if not failed:
        return None
    first = min(failed, key=lambda e: (_order(e)[0], -(e.ended.number if e.ended else 0), _order(e)))
    if first.state.exit_code == HANG_CODE and not first.last.halted:
        return _hang(first, evidence)
    return (_left_early(first, evidence) if is_victim(first) else None) or _describe(first)


def _left_early(victim: Evidence, evidence: Sequence[Evidence]) -> Failure | None:
    """Return the ranks that exited with code 0 while others waited for them, or None."""
    for each in evidence:
        ranks = [*each.node.ranks]
        if each.state.exit_code != 0 and not each.last.left:
            failed = {int(rank) for rank in _REPORTED_RANK.findall(each.log)}
            unknown = not failed or "closing signal" in each.log  # torchrun has stopped some of them
            ranks = [] if unknown else [rank for rank in ranks if rank not in failed]
        if ranks:
            who = "" if len(ranks) == 1 else f"ended: its ranks {', '.join(map(str, ranks))} "
            what = f"{who}exited with code 0 while others still waited for them"
            fix = "all ranks must call the same collectives; check whether one has fewer batches than the others"
            return Failure(each.node.name, None if who else ranks[0], 0, what, fix, _own_output(victim))
    return None


def is_victim(evidence: Evidence) -> bool:
    """Return whether a node ended because of another one: it was stopped or lost its peer."""
    return _order(evidence)[0] >= _VICTIM_ORDER


_VICTIM_ORDER = 3


def _order(evidence: Evidence) -> tuple[int, float, int]:
    output, state, error = _own_output(evidence), evidence.state, evidence.error
    if evidence.last.halted:
        kind = -1
    elif state.oom_killed or state.error or state.exit_code in (TIMEOUT_CODE, HANG_CODE):
        kind = 0
    elif evidence.last.left:  # what torchrun printed when it was stopped is not the reason
        kind = _VICTIM_ORDER + 2
    elif evidence.ended and evidence.node.name not in evidence.ended.nodes:
        kind = _VICTIM_ORDER + 1
    elif VICTIM.search(output):
        kind = _VICTIM_ORDER
    elif TRACEBACK in output:
        kind = 1
    elif state.exit_code in (SIGTERM_CODE, SIGKILL_CODE) and error is None:
        kind = _VICTIM_ORDER + 1
    else:
        kind = 2
    return kind, (error and error.time) or state.finished, evidence.node.rank


def _describe(evidence: Evidence) -> Failure:
    state, output, rank = evidence.state, _own_output(evidence), _failing_rank(evidence)
    what, fix = _ending(evidence)
    if halted := evidence.last.halted:
        output = last_stack(evidence.rank_logs.get(min(halted), ""))
        what = "was suspended (SIGSTOP, or a debugger) while the others waited for it"
        fix = "find out what stopped it; `kill -CONT` resumes such a process"
    elif by_slurm := re.match(r"was ended by Slurm: job \S+ (\w+)", state.error):
        what, fix = state.error, _BY_SLURM.get(by_slurm[1], "")
        rank, output = None, ""  # what the program printed when it was stopped is not the reason
    elif state.oom_killed:
        what, fix = "was killed: out of memory", "use fewer loader workers, or raise resources.memory"
    elif state.exit_code == TIMEOUT_CODE:
        what, fix = "reached the job's time limit", "raise `timeout`"
    elif state.error:
        what = f"could not be started: {state.error}"
        fix = (gpu_error(state.error) or ("", fix))[1]
    else:
        log = evidence.rank_logs.get(rank, evidence.log) if rank is not None else evidence.log
        if known := known_cause(output, log, evidence.node.name):
            what, fix = f"{what}: {known.what}", known.fix
    what = f"{what}; {evidence.give_up_reason}" if evidence.give_up_reason else what
    return Failure(evidence.node.name, rank, state.exit_code, what, fix, output)


def _ending(evidence: Evidence) -> tuple[str, str]:
    """Return how its failing rank, or else its program, ended, and a fix."""
    code, (_, reported) = evidence.state.exit_code or 0, _root_cause(evidence)
    number = -reported or code - 128
    if number not in _SIGNALS:
        return f"exited with code {code}", ""
    fix = "check `dmesg` on the node: it may have run out of memory" if _SIGNALS[number] == "SIGKILL" else ""
    return f"was killed by {_SIGNALS[number]}" + ("" if reported else f" (exit code {code})"), fix


def _own_output(evidence: Evidence) -> str:
    """Return the failing rank's traceback from its own log, else torchrun's error file, else the end of the log."""
    rank = _failing_rank(evidence)
    logs = evidence.rank_logs
    candidates = [logs[rank]] if rank is not None and rank in logs else list(logs.values())
    for text in candidates:
        if traceback := last_traceback(text):
            return traceback
    if evidence.error is not None:
        return evidence.error.text
    for text in (*candidates, evidence.log):
        if text.strip():
            return last_output(text)
    return ""


def _hang(first: Evidence, evidence: Sequence[Evidence]) -> Failure:
    """Return the node that detected the hang, the stack of every rank, and the ranks that the others waited for."""
    nodes = {rank: e.node.name for e in evidence for rank in e.rank_logs}
    logs = {rank: text for e in evidence for rank, text in e.rank_logs.items()}
    # A rank that waited exits with a connection error as soon as another one has exited.
    stacks = {rank: s for rank, text in sorted(logs.items()) if (s := last_stack(text) or last_traceback(text))}
    waiting = {rank for rank, stack in stacks.items() if _WAITING.search(stack)}
    lagging = sorted(stacks.keys() - waiting) if waiting else []
    what = "hung: no output and no step within the job's hang_timeout"
    if lagging:
        what += f"; {OTHERS_WAIT} " + ", ".join(f"rank {rank} on {nodes[rank]}" for rank in lagging)
    stacks_text = "\n".join(f"rank {rank} on {nodes[rank]}: {stack}" for rank, stack in stacks.items())
    fix = "see the stacks of the ranks above; raise `hang_timeout` if such a pause is normal"
    if stacks and all(_IMPORTING in stack for stack in stacks.values()):
        what, fix = (
            f"{what}; its ranks were still importing",
            "raise `hang_timeout`: imports from a cold disk take minutes",
        )
    return Failure(first.node.name, None, HANG_CODE, what, fix, stacks_text)


def last_stack(text: str) -> str:
    """Return the last stack of the main thread that Python's faulthandler printed, newest call first, or ""."""
    start = text.rfind("Fatal Python error")
    if start < 0:
        return ""
    lines = text[start:].splitlines()
    main = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), 0)
    wanted = itertools.takewhile(lambda line: line.startswith(("Current thread", "  File", "  ...")), lines[main:])
    return "\n".join(wanted)


def _root_cause(evidence: Evidence) -> tuple[int | None, int]:
    """Return the global rank and exit code that torchrun's last report calls the root cause; code 0 if it has none."""
    match = _ROOT_CAUSE.match(evidence.log, max(0, evidence.log.rfind("Root Cause")))
    return (int(match[1]), int(match[2] or 0)) if match else (None, 0)


def _failing_rank(evidence: Evidence) -> int | None:
    """Return the global rank that failed first on this node, or None if unknown."""
    if halted := evidence.last.halted:
        return min(halted)
    rank, _ = _root_cause(evidence)
    if rank is not None:
        return rank
    return next(iter(evidence.rank_logs)) if len(evidence.rank_logs) == 1 else None
