"""Find the rank that failed first and why: its own output, and a known cause with a fix. Victims are not blamed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from launcher.container_scripts.words import (
    LINES,
    LONGEST_ERROR,
    bounded,
    error_line,
    in_collective,
    last_output,
    last_traceback,
    lost_peer,
    reason,
)
from launcher.faults.lookup import of_output, said
from launcher.faults.table import ENGINE, SIGNAL
from launcher.hangs.report import OTHERS_WAIT
from launcher.run.end.evidence import Evidence
from launcher.run.result import Failure
from launcher.run.state import HANG_CODE, SIGKILL_CODE, SIGTERM_CODE, TIMEOUT_CODE

_NOTHING: Mapping[str, str] = MappingProxyType({})

# In torchrun's report, for each rank that failed: its exit code, negative if a signal killed it
_LINGERS = re.compile(
    r"^launcher: ranks? .* still runs?, \d+ s after ranks? ([\d, ]+) exited with code 0$", re.MULTILINE
)
_REPORTED = re.compile(r"\brank\s*:\s*(\d+)(?:[^\[]{0,300}?\bexitcode\s*:\s*(-?\d+))?")
# Linux signal numbers, as on the nodes; the caller's system may use others
_NAMES = "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM"
_SIGTERM = 15
_SIGNALS = {number: f"SIG{name}" for number, name in enumerate(_NAMES.split(), start=1)}

_OWN_CODES = (TIMEOUT_CODE, HANG_CODE)  # of the entry script

# What a rank prints after the traceback that ends it: of threads, C++ and trackers, besides a summary of its own
_AT_EXIT = re.compile(
    r"\s|frame #|(\[\w+\]:)?\[[WEIF][\d ]|Exception |terminate called|wandb: |\S{1,300}:\d+:\d+ \[\d+\] NCCL "
)
_MOST_AT_EXIT = 100  # lines

_IMPORTING = "<frozen importlib._bootstrap>"  # in the stack of a rank that is importing a module
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3|<frozen ")
# Stack frames of a rank that waits for others; a collective on GPUs waits in torch.cuda or backward.
_WAITING = re.compile(r"torch/(distributed|autograd|cuda|nn/parallel)/")
_STARTED = re.compile(r'multiprocessing/process\.py", line \d+ in _bootstrap')  # a process of Python's multiprocessing

COMMAND = "launcher up JOB --resume RUN"  # run.end.resumable knows which
_RESUME = f"resume from its last checkpoint: {COMMAND}"
_AGAIN = f"{_RESUME}; with `restarts` set, Slurm restarts such a job automatically"
_BY_SLURM = {  # Slurm's job state, and the fix
    "TIMEOUT": f"raise `time` of the cluster, or `timeout` of the job; {_RESUME}",
    "DEADLINE": _RESUME,
    "CANCELLED": _RESUME,
    "OUT_OF_MEMORY": "make the program use less memory, or raise resources.memory",
    "NODE_FAIL": _AGAIN,
    "BOOT_FAIL": _AGAIN,
    "PREEMPTED": _AGAIN,
}
# A task of Slurm that ended before the node's program started, or the batch script
_UNSTARTED = re.compile(
    r"(?:its task|its batch script could not write to .*?|job \S+: \w+ \(JobLaunchFailure\))"
    r"(?: on (\S+))?(?: exited .*)?"
)
_SEES = "check whether {} sees the cluster's workdir and can write there: launcher doctor JOB --on CLUSTER"


def first_failure(evidence: Sequence[Evidence], known: Mapping[str, str] = _NOTHING) -> Failure | None:
    """Return the failure that caused the others, or None if every container exited with code 0.

    known: of the run, for faults.lookup.of_output: port, place, output.

    Suspended ranks, out-of-memory kills reported by the engine and time limits come first; then ranks that failed on
    their own, then nodes that did not start, before ranks that only lost a peer; then by time, then by rank. If all
    ranks only lost a peer, the cause is a rank that exited early, else a node that was killed first.
    """
    failed = [e for e in evidence if e.state.exit_code not in (0, None) or e.state.error]
    if not failed:
        return None
    first = min(failed, key=lambda e: (_order(e)[0], -(e.ended.number if e.ended else 0), _order(e)))
    if _hung(first) and not first.last.halted:
        return _hang(first, evidence)
    if is_victim(first):
        killed = _killed_first(failed)
        if killed is not None and killed is min(evidence, key=lambda each: each.ended_at):
            return _describe(killed, known)  # the others, whatever their exit codes, ended after it
        return _left_early(first, evidence) or _describe(killed or first, known)
    return _describe(first, known)


def _killed_first(failed: Sequence[Evidence]) -> Evidence | None:
    """Return the node that ended first, if SIGKILL ended it and it did not say why: the others lost it as a peer."""
    earliest = min(failed, key=lambda each: each.ended_at)
    said = earliest.error is not None or lost_peer(_own_output(earliest)) or earliest.last.left
    in_last = earliest.ended is None or earliest.node.name in earliest.ended.nodes
    return earliest if earliest.state.exit_code == SIGKILL_CODE and not said and in_last else None


def _left_early(victim: Evidence, evidence: Sequence[Evidence]) -> Failure | None:
    """Return the ranks that exited with code 0 while others waited for them, or None."""
    for each in evidence:
        ranks = [*each.node.ranks]
        if each.state.exit_code != 0 and not each.last.left:
            failed = {rank for rank, _ in each.last.failed} or {int(r) for r, _ in _REPORTED.findall(each.log)}
            unknown = not failed or "closing signal" in each.log  # torchrun has stopped some of them
            ranks = [] if unknown else [rank for rank in ranks if rank not in failed]
        if ranks:
            who = "" if len(ranks) == 1 else f"ended: its ranks {', '.join(map(str, ranks))} "
            what = f"{who}exited with code 0 while others still waited for them"
            output = _own_output(victim)
            fix = "all ranks must call the same collectives, equally often" if in_collective(output) else ""
            return Failure(each.node.name, None if who else ranks[0], 0, what, fix, output)
    return None


def is_victim(evidence: Evidence) -> bool:
    """Return whether a node ended because of another one: it was stopped or lost its peer."""
    return _order(evidence)[0] >= _VICTIM_ORDER


_SUSPECT_ORDER, _VICTIM_ORDER = 3, 5


def _order(evidence: Evidence) -> tuple[int, float, int]:
    output, state, error = _own_output(evidence), evidence.state, evidence.error
    if evidence.last.halted:
        kind = -1
    elif _did_not_start(evidence):
        kind = _SUSPECT_ORDER if state.error else _SUSPECT_ORDER + 1
    elif state.oom_killed or state.error or _timed_out(evidence) or _hung(evidence):
        kind = 0
    elif evidence.last.left:  # what torchrun printed when it was stopped is not the reason
        kind = _VICTIM_ORDER + 2
    elif evidence.ended and evidence.node.name not in evidence.ended.nodes:
        kind = _VICTIM_ORDER + 1
    elif lost_peer(output):
        kind = _VICTIM_ORDER
    elif error or reason(output):
        kind = 1
    elif state.exit_code in (SIGTERM_CODE, SIGKILL_CODE) and error is None:
        kind = _VICTIM_ORDER + 1
    else:
        kind = 2
    return kind, evidence.failed_at, evidence.node.rank


def _did_not_start(evidence: Evidence) -> bool:
    """Whether its program did not start, and nothing is known to have kept it from that: it may be the reason."""
    state = evidence.state
    never = state.exit_code is not None and not state.started and not evidence.attempts
    return never and (not state.error or state.error.startswith("its task"))


def _timed_out(evidence: Evidence) -> bool:
    """Whether entry.sh ended it at the job's time limit: a program may exit with the same code."""
    return evidence.state.exit_code == TIMEOUT_CODE and "launcher: time limit of" in evidence.log


def _hung(evidence: Evidence) -> bool:
    """Whether entry.sh ended it because of hang_timeout; its message may be far above the stacks of many ranks."""
    if evidence.state.exit_code != HANG_CODE:
        return False
    return "launcher: no output and no step" in evidence.log or any(map(last_stack, evidence.rank_logs.values()))


def _describe(evidence: Evidence, known: Mapping[str, str]) -> Failure:
    state, output, rank = evidence.state, _own_output(evidence), _failing_rank(evidence)
    what, fix = _ending(evidence), ""
    if halted := evidence.last.halted:
        output = last_stack(evidence.rank_logs.get(min(halted), ""))
        what = "was suspended (SIGSTOP, or a debugger) while the others waited for it"
        fix = "find out what stopped it; `kill -CONT` resumes such a process"
    elif by_slurm := re.match(r"was ended by Slurm: job \S+ (\w+)", state.error):
        what, fix = state.error, _BY_SLURM.get(by_slurm[1], "")
        rank, output = None, ""  # what the program printed when it was stopped is not the reason
    elif state.oom_killed:
        what, fix = "was killed: out of memory", "make the program use less memory, or raise resources.memory"
    elif _timed_out(evidence):
        what = "reached the job's time limit (`timeout`)"
    elif state.error:
        what = f"could not be started: {state.error}"
        fix = cause.fix if (cause := said(ENGINE, state.error)) else ""
        if unstarted := _UNSTARTED.fullmatch(state.error):
            fix = _sees(unstarted[1])
    elif _did_not_start(evidence) and state.exit_code in (SIGTERM_CODE, SIGKILL_CODE):
        what, fix = "did not start its program", _sees(None)
    else:
        log = evidence.rank_logs.get(rank, evidence.log) if rank is not None else evidence.log
        about = {**known, "node": evidence.node.name, "code": str(_code(evidence))}
        if (cause := of_output(output, f"{log}\n{evidence.nccl}", about)) or (cause := said(SIGNAL, what)):
            what, fix = f"{what}: {cause.what}", cause.fix
        elif named := error_line(output)[:LONGEST_ERROR]:
            what = f"{what}: {named}"
    what = f"{what}; {evidence.give_up_reason}" if evidence.give_up_reason else what
    return Failure(evidence.node.name, rank, _code(evidence), what, fix, output)


def _sees(machine: str | None) -> str:
    """Return the fix for a machine of a cluster that started nothing. machine: its name, if it is known."""
    only = (
        f" --set nodes=1 --set 'cluster.options=[--nodelist={machine}]'"
        if machine and re.fullmatch(r"[\w.-]+", machine)
        else ""
    )
    return _SEES.format(machine or "its machine") + only


def _code(evidence: Evidence) -> int | None:
    """Return the exit code of the rank that failed first: that of torchrun, from an earlier version, is always 1."""
    reported = _reported_code(evidence)
    return reported if reported > 0 and evidence.state.exit_code not in _OWN_CODES else evidence.state.exit_code


def _ending(evidence: Evidence) -> str:
    """Return how its failing rank, or else its program, ended."""
    code, reported = _code(evidence) or 0, _reported_code(evidence)
    number = -reported or code - 128
    if number not in _SIGNALS:
        return f"exited with code {code}"
    return f"was killed by {_SIGNALS[number]}" + ("" if reported else f" (exit code {code})")


def _own_output(evidence: Evidence) -> str:
    """Return the failing rank's error from its own log, else torchrun's error file, else the end of the log."""
    rank = _failing_rank(evidence)
    logs = evidence.rank_logs
    candidates = [logs[rank]] if rank is not None and rank in logs else list(logs.values())
    for text in candidates:
        if (own := reason(text)) and not _went_on(text, own):
            return own
    if evidence.error is not None:
        return evidence.error.text
    if text := next((text for text in candidates if text.strip()), ""):
        return "\n".join(text.rstrip().splitlines()[-LINES:])
    return last_output(evidence.log) if evidence.log.strip() else ""


def _went_on(text: str, own: str) -> bool:
    """Whether a rank printed so much after its last error that the program must have handled that."""
    last = own.rstrip().rpartition("\n")[2]
    _, found, after = bounded(text).rpartition(last)
    lines = after.splitlines() if found else []
    return sum(bool(line.strip()) and not _AT_EXIT.match(line) for line in lines) > _MOST_AT_EXIT


def _hang(first: Evidence, evidence: Sequence[Evidence]) -> Failure:
    """Return the node that detected the hang, the stack of every rank, and the ranks that the others waited for."""
    nodes = {rank: e.node.name for e in evidence for rank in e.rank_logs}
    logs = {rank: text for e in evidence for rank, text in e.rank_logs.items()}
    stacks = {rank: stack for rank, text in sorted(logs.items()) if (stack := _stood(text))}
    waiting = {rank for rank, stack in stacks.items() if _WAITING.search(stack)}
    lagging = sorted(stacks.keys() - waiting) if waiting else []
    what = "hung: no output and no step within the job's hang_timeout"
    debugged = [f"rank {one.rank} on {e.node.name} was in {one.place}" for e in evidence for one in e.at_breakpoint]
    if debugged:
        what += f"; {', '.join(debugged)}, and nobody followed the run"
    elif lagging:
        what += f"; {OTHERS_WAIT} " + ", ".join(f"rank {rank} on {nodes[rank]}" for rank in lagging)
    elif ranks := _lingering(evidence, stacks.keys()):
        what += f"; {ranks} did not exit, although all other ranks had exited with code 0"
    stacks_text = "\n".join(f"rank {rank} on {nodes[rank]}: {stack}" for rank, stack in stacks.items())
    fix = "see the stacks of the ranks above; raise `hang_timeout` if such a pause is normal"
    if debugged:
        fix = "follow the run (launcher logs) while a rank is debugged, or raise `hang_timeout`"
    elif stacks and all(map(_importing, stacks.values())):
        what = f"{what}; its ranks were still importing"
        fix = "raise `hang_timeout` if the first import from this disk takes that long"
    return Failure(first.node.name, None, HANG_CODE, what, fix, stacks_text)


def _stood(text: str) -> str:
    """Return where a rank stood, by its log: its stack, unless the program had ended by then.

    A rank that waited exits with a connection error as soon as another one has exited.
    """
    stack = last_stack(text)
    runs = " in <module>" in stack or stack.endswith("  ...")  # it is cut short if it is deep
    return stack if runs and not _STARTED.search(stack) else last_traceback(text) or stack


def _lingering(evidence: Sequence[Evidence], alive: Collection[int]) -> str:
    """Return the ranks that still ran when all others had exited with code 0; "" if none had, or if it is not known.

    alive: the ranks that printed their stacks.
    """
    nodes = {rank: e.node.name for e in evidence for rank in e.node.ranks}
    done = {rank for e in evidence if e.state.exit_code == 0 or e.last.left for rank in e.node.ranks}
    done |= {int(rank) for e in evidence for ranks in _LINGERS.findall(e.log) for rank in ranks.split(",")}
    left = sorted(nodes.keys() - done)
    left = left if len(left) == 1 else [rank for rank in left if rank in alive]  # the others may have exited since
    return ", ".join(f"rank {rank} on {nodes[rank]}" for rank in left) if done else ""


def _importing(stack: str) -> bool:
    """Whether a rank was inside the import of a library: not in a function of the user's module, which was imported."""
    newer = itertools.takewhile(lambda line: _IMPORTING not in line, stack.splitlines()[1:])
    return _IMPORTING in stack and all(_LIBRARY.search(line) for line in newer)


def last_stack(text: str) -> str:
    """Return the last stack of the main thread that Python's faulthandler printed, newest call first, or "".

    Those of processes that a rank has started by multiprocessing, such as its data loader's, only if there is no other.
    """
    stacks = [_of_main_thread(part.splitlines()) for part in text.split("Fatal Python error")[1:]]
    own = [stack for stack in stacks if not _STARTED.search(stack)]
    return (own or stacks or [""])[-1]


def _of_main_thread(lines: Sequence[str]) -> str:
    main = next((i for i, line in enumerate(lines) if line.startswith("Current thread")), 0)
    wanted = itertools.takewhile(lambda line: line.startswith(("Current thread", "  File", "  ...")), lines[main:])
    return "\n".join(wanted)


def _failed(evidence: Evidence) -> dict[int, int]:
    """Return the exit codes of the ranks that failed, by rank, 0 if unknown; the first that torchrun observed first."""
    if evidence.last.failed:
        return dict(evidence.last.failed)
    start = evidence.log.rfind("Root Cause")  # the report of torchrun itself, in runs of earlier versions
    if start < 0:
        return {}
    before = evidence.log.rfind("Failures:", 0, start)
    others = _REPORTED.findall(evidence.log, before, start) if before >= 0 else []
    found = {int(rank): int(code or 0) for rank, code in (*_REPORTED.findall(evidence.log, start)[:1], *others)}
    return {rank: code for rank, code in found.items() if code != -_SIGTERM} or found  # by which torchrun stops others


def _reported_code(evidence: Evidence) -> int:
    """Return the exit code of the failing rank, negative if a signal killed it; 0 if unknown."""
    rank = _failing_rank(evidence)
    return 0 if rank is None else _failed(evidence).get(rank, 0)


def _failing_rank(evidence: Evidence) -> int | None:
    """Return the global rank that failed first on this node, or None if unknown.

    The ranks of a node end within milliseconds of each other, so the first that torchrun observed may have lost its
    peer, or have exited without a word because another one reports an error for all.
    """
    if halted := evidence.last.halted:
        return min(halted)
    failed, logs = _failed(evidence), evidence.rank_logs
    if not failed:
        return next(iter(logs)) if len(logs) == 1 else None
    own = [rank for rank in failed if rank not in logs or not lost_peer(last_output(logs[rank]))]
    told = [rank for rank in own if failed[rank] < 0 or reason(logs.get(rank, ""))]
    return next(iter((*told, *own, *failed)))
