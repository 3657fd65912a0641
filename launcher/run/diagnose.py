"""Which rank failed first, and why: its own words, a known cause with its fix; victims are not blamed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.container_scripts.words import TRACEBACK, VICTIM, last_traceback, last_words
from launcher.node.docker.toolkit import gpu_error
from launcher.run.evidence import Evidence
from launcher.run.known_causes import known_cause
from launcher.run.state import HANG_CODE, SIGKILL_CODE, SIGTERM_CODE, TIMEOUT_CODE

OTHERS_WAIT = "the others wait for"

# In torchrun's report: the rank that failed first, and its exit code, negative where a signal killed it
_ROOT_CAUSE = re.compile(r"Root Cause.*?\brank\s*:\s*(\d+)(?:.*?\bexitcode\s*:\s*(-?\d+))?", re.DOTALL)
# Linux's, which are a node's; the caller's own may have other numbers
_NAMES = "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM"
_SIGNALS = {number: f"SIG{name}" for number, name in enumerate(_NAMES.split(), start=1)}

_REPORTED_RANK = re.compile(r"\brank\s*: (\d+)")  # in torchrun's list of the ranks that failed

_IMPORTING = "<frozen importlib._bootstrap>"  # in the stack of a rank that imports a module
# Where a stack shows that its rank waits for others; for a collective on GPUs it waits in torch.cuda or backward.
_WAITING = re.compile(r"torch/(distributed|autograd|cuda|nn/parallel)/")

_RESUME = "go on from its last checkpoint: launcher up JOB --resume RUN"
_AGAIN = f"{_RESUME}; with `restarts` Slurm begins such a job again by itself"
_BY_SLURM = {  # what it calls the end of a job, and the fix
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
    """Why a run failed. `words` is the failing rank's own traceback or last lines."""

    node: str
    rank: int | None  # global rank of the worker; None where it is the node's container as a whole
    exit_code: int | None
    what: str
    cure: str  # what to do about it; named as in result.json
    words: str


def first_failure(evidence: Sequence[Evidence]) -> Failure | None:
    """The failure that caused the others; None where every container ended well.

    A rank that was suspended, out of memory as the engine reports it and a time limit come first; then a rank that
    failed on its own before one that only lost its peer; then by time, then by rank. Where all have only lost a peer,
    it is a rank that has left.
    """
    failed = [e for e in evidence if e.state.exit_code not in (0, None) or e.state.error]
    if not failed:
        return None
    first = min(failed, key=lambda e: (_order(e)[0], -(e.ended.number if e.ended else 0), _order(e)))
    if first.state.exit_code == HANG_CODE and not first.last.halted:
        return _hang(first, evidence)
    return (_left(first, evidence) if is_victim(first) else None) or _describe(first)


def _left(victim: Evidence, evidence: Sequence[Evidence]) -> Failure | None:
    """The ranks that ended well while others waited for them; None where none did."""
    for each in evidence:
        ranks = [*each.node.ranks]
        if each.state.exit_code != 0 and not each.last.left:
            failed = {int(rank) for rank in _REPORTED_RANK.findall(each.log)}
            unknown = not failed or "closing signal" in each.log  # torchrun has ended some of them itself
            ranks = [] if unknown else [rank for rank in ranks if rank not in failed]
        if ranks:
            who = "" if len(ranks) == 1 else f"ended: its ranks {', '.join(map(str, ranks))} "
            what = f"{who}left with exit code 0 while others still waited for them"
            fix = "all ranks must take part in the same collectives: has one fewer batches than the others?"
            return Failure(each.node.name, None if who else ranks[0], 0, what, fix, _words(victim))
    return None


def is_victim(evidence: Evidence) -> bool:
    """It ended because another one did: it was stopped, or it lost its peer."""
    return _order(evidence)[0] >= _VICTIM_ORDER


_VICTIM_ORDER = 3


def _order(evidence: Evidence) -> tuple[int, float, int]:
    words, state, error = _words(evidence), evidence.state, evidence.error
    if evidence.last.halted:
        kind = -1
    elif state.oom_killed or state.error or state.exit_code in (TIMEOUT_CODE, HANG_CODE):
        kind = 0
    elif evidence.last.left:  # what its torchrun printed when it was stopped is no reason
        kind = _VICTIM_ORDER + 2
    elif evidence.ended and evidence.node.name not in evidence.ended.nodes:
        kind = _VICTIM_ORDER + 1
    elif VICTIM.search(words):
        kind = _VICTIM_ORDER
    elif TRACEBACK in words:
        kind = 1
    elif state.exit_code in (SIGTERM_CODE, SIGKILL_CODE) and error is None:
        kind = _VICTIM_ORDER + 1
    else:
        kind = 2
    return kind, (error and error.time) or state.finished, evidence.node.rank


def _describe(evidence: Evidence) -> Failure:
    state, words, rank = evidence.state, _words(evidence), _failing_rank(evidence)
    what, fix = _ending(evidence)
    if halted := evidence.last.halted:
        words = last_stack(evidence.rank_logs.get(min(halted), ""))
        what = "was suspended (SIGSTOP, or a debugger) while the others waited for it"
        fix = "who stopped it? `kill -CONT` lets such a process go on"
    elif by_slurm := re.match(r"was ended by Slurm: job \S+ (\w+)", state.error):
        what, fix = state.error, _BY_SLURM.get(by_slurm[1], "")
        rank, words = None, ""  # what the program printed when it was ended is no reason
    elif state.oom_killed:
        what, fix = "was killed: the node's memory is full", "fewer loader workers, or resources.memory"
    elif state.exit_code == TIMEOUT_CODE:
        what, fix = "reached the job's time limit", "raise `timeout`"
    elif state.error:
        what = f"could not be started: {state.error}"
        fix = (gpu_error(state.error) or ("", fix))[1]
    else:
        log = evidence.rank_logs.get(rank, evidence.log) if rank is not None else evidence.log
        if known := known_cause(words, log, evidence.node.name):
            what, fix = f"{what}: {known.what}", known.fix
    what = f"{what}; {evidence.over}" if evidence.over else what
    return Failure(evidence.node.name, rank, state.exit_code, what, fix, words)


def _ending(evidence: Evidence) -> tuple[str, str]:
    """What its failing rank, else its program, ended with, and a fix for that."""
    code, (_, reported) = evidence.state.exit_code or 0, _root_cause(evidence)
    number = -reported or code - 128
    if number not in _SIGNALS:
        return f"exited with code {code}", ""
    fix = "was its memory full? see `dmesg` on the node" if _SIGNALS[number] == "SIGKILL" else ""
    return f"was killed by {_SIGNALS[number]}" + ("" if reported else f" (exit code {code})"), fix


def _words(evidence: Evidence) -> str:
    """The failing rank's own words: its traceback from its own log, else torchrun's error file, else the log's end."""
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
            return last_words(text)
    return ""


def _hang(first: Evidence, evidence: Sequence[Evidence]) -> Failure:
    """The node that noticed, where every rank stood, and which of them the others waited for."""
    nodes = {rank: e.node.name for e in evidence for rank in e.rank_logs}
    logs = {rank: text for e in evidence for rank, text in e.rank_logs.items()}
    # A rank that waited ends with an error of its connection as soon as another one is gone.
    stacks = {rank: s for rank, text in sorted(logs.items()) if (s := last_stack(text) or last_traceback(text))}
    waiting = {rank for rank, stack in stacks.items() if _WAITING.search(stack)}
    lagging = sorted(stacks.keys() - waiting) if waiting else []
    what = "hung: no output and no step for the job's hang_timeout"
    if lagging:
        what += f"; {OTHERS_WAIT} " + ", ".join(f"rank {rank} on {nodes[rank]}" for rank in lagging)
    words = "\n".join(f"rank {rank} on {nodes[rank]}: {stack}" for rank, stack in stacks.items())
    fix = "see above where the ranks stood; raise `hang_timeout` if such a pause is normal"
    if stacks and all(_IMPORTING in stack for stack in stacks.values()):
        what, fix = f"{what}; its ranks were still importing", "raise `hang_timeout`: a cold disk takes minutes"
    return Failure(first.node.name, None, HANG_CODE, what, fix, words)


def last_stack(text: str) -> str:
    """What Python's fault handler printed last: every thread's stack, the newest call first; "" where there is none."""
    start = text.rfind("Fatal Python error")
    if start < 0:
        return ""
    lines = text[start:].splitlines()
    main = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), 0)
    wanted = itertools.takewhile(lambda line: line.startswith(("Current thread", "  File", "  ...")), lines[main:])
    return "\n".join(wanted)


def _root_cause(evidence: Evidence) -> tuple[int | None, int]:
    """The global rank that torchrun reports as that, and its exit code; 0 where it reports none. Of its last report."""
    match = _ROOT_CAUSE.match(evidence.log, max(0, evidence.log.rfind("Root Cause")))
    return (int(match[1]), int(match[2] or 0)) if match else (None, 0)


def _failing_rank(evidence: Evidence) -> int | None:
    """The global rank that torchrun calls the root cause on this node."""
    if halted := evidence.last.halted:
        return min(halted)
    rank, _ = _root_cause(evidence)
    if rank is not None:
        return rank
    return next(iter(evidence.rank_logs)) if len(evidence.rank_logs) == 1 else None
