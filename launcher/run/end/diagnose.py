"""Who of a run's nodes is to blame for its end, and what that node has said. Pure functions of what they left.

Victims, which only lost a peer or were stopped, are not blamed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Sequence
from enum import IntEnum, auto

from launcher.container_scripts.words import (
    LINES,
    bounded,
    error_or_last_lines,
    error_text,
    in_collective,
    last_traceback,
    lost_peer,
)
from launcher.hangs.report import OTHERS_WAIT
from launcher.naming import first_of
from launcher.run.end.evidence import Evidence
from launcher.run.result import Failure
from launcher.run.state import HANG_CODE, SIGKILL_CODE, SIGTERM_CODE, TIMEOUT_CODE

_LINGERS = re.compile(
    r"^launcher: ranks? .* still runs?, \d+ s after ranks? ([\d, ]+) exited with code 0$", re.MULTILINE
)
# In torchrun's report, for each rank that failed: its exit code, negative if a signal killed it
_REPORTED = re.compile(r"\brank\s*:\s*(\d+)(?:[^\[]{0,300}?\bexitcode\s*:\s*(-?\d+))?")
# Linux signal numbers, as on the nodes; the caller's system may use others
_NAMES = "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM"
_SIGTERM = 15
_SIGNALS = {number: f"SIG{name}" for number, name in enumerate(_NAMES.split(), start=1)}

LOGS = "runs/RUN/logs/"  # in a fix, in place of the run's own
_NAMED = 2  # files in a fix

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


class Blamed(IntEnum):
    """As what a node is blamed for the end of its run: of several nodes, the one that is the first of these."""

    SUSPENDED = auto()  # a rank that was suspended while the others waited for it
    REPORTED = auto()  # its engine, its cluster or entry.sh says why it was ended or not started
    SAID = auto()  # its program says an error of its own
    SILENT = auto()  # its program failed without a word
    SUSPECT = auto()  # it did not start its program; what its cluster says of that may have had another reason
    UNSTARTED = auto()  # it did not start its program, without a word
    # victims: they ended because of another one
    LOST_PEER = auto()  # its program says that it lost its peer
    STOPPED = auto()  # it was stopped or killed, or went on until its generation had ended
    LEFT = auto()  # all its ranks had exited, and it waited for the others


def blamed_as(evidence: Evidence) -> Blamed:
    """Return as what a node is blamed that has failed, or of which it is not known."""
    output, state, error = own_output(evidence), evidence.state, evidence.error
    if evidence.last.halted:
        return Blamed.SUSPENDED
    if did_not_start(evidence):
        return Blamed.SUSPECT if state.error else Blamed.UNSTARTED
    if evidence.out_of_memory or state.error or ended_at_time_limit(evidence) or ended_at_hang_timeout(evidence):
        return Blamed.REPORTED
    if evidence.last.ranks_had_exited:  # what torchrun printed when it was stopped is not the reason
        return Blamed.LEFT
    if evidence.ended_generation and evidence.node.name not in evidence.ended_generation.nodes:
        return Blamed.STOPPED
    if lost_peer(output):
        return Blamed.LOST_PEER
    if error or error_text(output):
        return Blamed.SAID
    return Blamed.STOPPED if state.exit_code in (SIGTERM_CODE, SIGKILL_CODE) else Blamed.SILENT


def is_victim(evidence: Evidence) -> bool:
    """Return whether a node ended because of another one: it was stopped or lost its peer."""
    return blamed_as(evidence) >= Blamed.LOST_PEER


def to_blame(failed: Sequence[Evidence]) -> Evidence | None:
    """Return the node to blame among those that failed: of equals, one of the last generation that ended first."""

    by_itself = any(each.out_of_memory or blamed_as(each) in (Blamed.SAID, Blamed.SILENT) for each in failed)
    waited = not by_itself and killed_first(failed) is None

    def order(each: Evidence) -> tuple[Blamed, int, float, int]:
        generation = each.ended_generation.number if each.ended_generation else 0
        blamed = blamed_as(each)
        if blamed is Blamed.SUSPENDED and not waited:
            blamed = Blamed.STOPPED
        return blamed, -generation, each.failed_at, each.node.rank

    return min(failed, key=order, default=None)


def killed_first(failed: Sequence[Evidence]) -> Evidence | None:
    """Return the node that ended first, if SIGKILL ended it and it did not say why: the others lost it as a peer.

    Of those that ended within the same second, it comes first: a container ends only when its log is complete.
    """

    def was_killed(each: Evidence) -> bool:
        said = each.error is not None or lost_peer(own_output(each))
        in_last = each.ended_generation is None or each.node.name in each.ended_generation.nodes
        known = said or each.last.ranks_had_exited or each.last.halted
        return each.state.exit_code == SIGKILL_CODE and in_last and not known

    killed = min(filter(was_killed, failed), key=lambda each: each.ended_at, default=None)
    if killed is None or killed.ended_at[0] > min(each.ended_at[0] for each in failed):
        return None
    return killed


def failure_of_early_exit(victim: Evidence, evidence: Sequence[Evidence]) -> Failure | None:
    """Return the ranks that exited with code 0 while others waited for them, or None."""
    lost_one = blamed_as(victim) is Blamed.LOST_PEER  # whose container may have ended later than its connections
    for each in evidence:
        ranks = [*each.node.ranks]
        if not lost_one and each.state.exit_code == 0 and each.ended_at[0] > victim.ended_at[0]:
            continue
        if each.state.exit_code != 0 and not each.last.ranks_had_exited:
            failed = {rank for rank, _ in each.last.failed} or {int(r) for r, _ in _REPORTED.findall(each.log)}
            unknown = not failed or "closing signal" in each.log  # torchrun has stopped some of them
            ranks = [] if unknown else [rank for rank in ranks if rank not in failed]
        if ranks:
            who = "" if len(ranks) == 1 else f"ended: its ranks {', '.join(map(str, ranks))} "
            what = f"{who}exited with code 0 while others still waited for them"
            output = own_output(victim)
            fix = "all ranks must call the same collectives, equally often" if in_collective(output) else ""
            return Failure(each.node.name, None if who else ranks[0], 0, what, fix, output)
    return None


def did_not_start(evidence: Evidence) -> bool:
    """Whether its program never started, and its engine's message, if any, may follow from how another node ended."""
    state = evidence.state
    never = state.exit_code is not None and not state.started and not evidence.attempts
    return never and (not state.error or state.suspect)


def ended_at_time_limit(evidence: Evidence) -> bool:
    """Whether entry.sh ended it at the job's time limit: a program may exit with the same code."""
    return evidence.state.exit_code == TIMEOUT_CODE and "launcher: time limit of" in evidence.log


def ended_at_hang_timeout(evidence: Evidence) -> bool:
    """Whether entry.sh ended it because of hang_timeout; its message may be far above the stacks of many ranks."""
    if evidence.state.exit_code != HANG_CODE:
        return False
    return "launcher: no output and no step" in evidence.log or any(map(last_stack, evidence.rank_logs.values()))


def failure_of(evidence: Evidence, what: str, fix: str = "", words: str | None = None) -> Failure:
    """Return the failure of a node. words: None: what its failing rank has said."""
    what = f"{what}; {evidence.give_up_reason}" if evidence.give_up_reason else what
    words = own_output(evidence) if words is None else words
    return Failure(evidence.node.name, failing_rank(evidence), exit_code(evidence), what, fix, words)


def exit_code(evidence: Evidence) -> int | None:
    """Return the exit code of the rank that failed first, or, if a signal killed that one, of its container.

    That of torchrun, from an earlier version, is always 1.
    """
    reported = _reported_code(evidence)
    return reported if reported > 0 and evidence.state.exit_code not in _OWN_CODES else evidence.state.exit_code


def ending(evidence: Evidence) -> str:
    """Return how its failing rank, or else its program, ended."""
    code, reported = exit_code(evidence) or 0, _reported_code(evidence)
    number = -reported or code - 128  # negative: of a signal; 0: unknown, then as a shell says it
    if number not in _SIGNALS:
        return f"exited with code {code}"
    return f"was killed by {_SIGNALS[number]}" + ("" if reported else f" (exit code {code})")


def own_output(evidence: Evidence) -> str:
    """Return the failing rank's error from its own log, else torchrun's error file, else the end of the log."""
    rank = failing_rank(evidence)
    logs = evidence.rank_logs
    candidates = [logs[rank]] if rank is not None and rank in logs else list(logs.values())
    for text in candidates:
        if (own := error_text(text)) and not _went_on(text, own):
            return own
    if evidence.error is not None:
        return evidence.error.text
    if text := next((text for text in candidates if text.strip()), ""):
        return "\n".join(text.rstrip().splitlines()[-LINES:])
    return error_or_last_lines(evidence.log) if evidence.log.strip() else ""


def _went_on(text: str, own: str) -> bool:
    """Whether a rank printed so much after its last error that the program must have handled that."""
    last = own.rstrip().rpartition("\n")[2]
    _, found, after = bounded(text).rpartition(last)
    lines = after.splitlines() if found else []
    return sum(bool(line.strip()) and not _AT_EXIT.match(line) for line in lines) > _MOST_AT_EXIT


def failure_of_hang(first: Evidence, evidence: Sequence[Evidence]) -> Failure:
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
    stood = [f"rank {rank} on {nodes[rank]}: {stack}" for rank, stack in stacks.items()]
    if not logs:  # a command of the user's own
        stood = [f"on {e.node.name}: {stack}" for e in evidence if (stack := last_stack(e.log))]
    files = first_of([f"{LOGS}{e.node.name}.log" for e in evidence], _NAMED)
    where = "where each process stood" if stood else "what was printed last"
    fix = f"see {where}: {files}; raise `hang_timeout` if such a pause is normal"
    if debugged:
        fix = "follow the run (launcher logs) while a rank is debugged, or raise `hang_timeout`"
    elif stacks and all(map(_importing, stacks.values())):
        what = f"{what}; its ranks were still importing"
        fix = "raise `hang_timeout` if the first import from this disk takes that long"
    return Failure(first.node.name, None, HANG_CODE, what, fix, "\n".join(stood))


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
    done = {rank for e in evidence if e.state.exit_code == 0 or e.last.ranks_had_exited for rank in e.node.ranks}
    done |= {int(rank) for e in evidence for ranks in _LINGERS.findall(e.log) for rank in ranks.split(",")}
    lingering = sorted(nodes.keys() - done)
    if len(lingering) > 1:
        lingering = [rank for rank in lingering if rank in alive]  # the others may have exited since
    return ", ".join(f"rank {rank} on {nodes[rank]}" for rank in lingering) if done else ""


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
    rank = failing_rank(evidence)
    return 0 if rank is None else _failed(evidence).get(rank, 0)


def failing_rank(evidence: Evidence) -> int | None:
    """Return the global rank that failed first on this node, or None if unknown.

    The ranks of a node end within milliseconds of each other, so the first that torchrun observed may have lost its
    peer, or have exited without a word because another one reports an error for all.
    """
    if halted := evidence.last.halted:
        return min(halted)
    failed, logs = _failed(evidence), evidence.rank_logs
    if not failed:
        return next(iter(logs)) if len(logs) == 1 else None
    own = [rank for rank in failed if rank not in logs or not lost_peer(error_or_last_lines(logs[rank]))]
    told = [rank for rank in own if failed[rank] < 0 or error_text(logs.get(rank, ""))]
    return next(iter((*told, *own, *failed)))
