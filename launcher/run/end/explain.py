"""Why a run failed: the first of CAUSES that applies, then all REFINEMENTS, which ask its machines and its record."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from launcher import features
from launcher.container_scripts.words import LONGEST_ERROR, error_line, error_text
from launcher.errors import LauncherError
from launcher.extras import warn_on_error
from launcher.faults import disk
from launcher.faults.lookup import cause_of_output, cause_of_report
from launcher.faults.table import ENGINE, NOT_EXECUTABLE, SIGNAL
from launcher.hangs import report
from launcher.model.host import cluster_name
from launcher.model.sizes import size_text
from launcher.node import trees
from launcher.run.end import diagnose, resumable
from launcher.run.end.evidence import Evidence, collective_failed
from launcher.run.end.left_out import missing_here
from launcher.run.end.stop import runs_there
from launcher.run.locate import Attached
from launcher.run.result import Failure
from launcher.run.state import HANG_CODE, TIMEOUT_CODE

# of Python's error, in the program's output
_EXISTS = re.compile(r"FileExistsError: \[Errno 17\] [^:\n]+: '(?:/dev/shm)?/([^/'\n]{1,255})'")
_CLEAN = "what runs of this folder left: launcher clean --shared-memory"
FULL = 1 << 20  # bytes: a disk with less room is full


@dataclass(frozen=True)
class EndedRun:
    """A run that did not succeed.

    evidence: of the nodes that have ended, by rank. missing: failures of the others, by node. known: of the run, for
    faults.lookup.cause_of_output.
    """

    evidence: Sequence[Evidence]
    missing: Mapping[str, Failure] = field(default_factory=dict)
    known: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_node(self) -> Mapping[str, Evidence]:
        return {each.node.name: each for each in self.evidence}

    @cached_property
    def failed(self) -> Sequence[Evidence]:
        return [each for each in self.evidence if each.state.exit_code not in (0, None) or each.state.error]

    @cached_property
    def blamed(self) -> Evidence | None:
        """The node to blame, a victim if all are; None if none has failed."""
        return diagnose.to_blame(self.failed)


# --- causes: what ended the node to blame, or, if it is a victim, what the others may have lost


def suspended(run: EndedRun) -> Failure | None:
    blamed = run.blamed
    if blamed is None or not blamed.last.halted:
        return None
    what = "was suspended (SIGSTOP, or a debugger) while the others waited for it"
    stack = diagnose.last_stack(blamed.rank_logs.get(min(blamed.last.halted), ""))
    return diagnose.failure_of(blamed, what, "find out what stopped it; `kill -CONT` resumes such a process", stack)


def hung(run: EndedRun) -> Failure | None:
    blamed = run.blamed
    return diagnose.failure_of_hang(blamed, run.evidence) if blamed and diagnose.ended_at_hang_timeout(blamed) else None


def by_its_cluster(run: EndedRun) -> Failure | None:
    """What the cluster says that the run was on."""
    return _first(of_cluster(run.blamed.node.host), run) if run.blamed else None


def out_of_memory(run: EndedRun) -> Failure | None:
    blamed = run.blamed
    if blamed is None or not blamed.out_of_memory:
        return None
    fix = "make the program use less memory, or raise resources.memory"
    if not blamed.state.oom_killed:
        fix = "make the program use less memory, or, if the job has a limit, raise resources.memory"
    return diagnose.failure_of(blamed, "was killed: out of memory", fix)


def at_time_limit(run: EndedRun) -> Failure | None:
    blamed = run.blamed
    what = "reached the job's time limit (`timeout`)"
    return diagnose.failure_of(blamed, what) if blamed and diagnose.ended_at_time_limit(blamed) else None


def not_started(run: EndedRun) -> Failure | None:
    blamed = run.blamed
    if blamed is None or not blamed.state.error:
        return None
    cause = cause_of_report(ENGINE, blamed.state.error)
    return diagnose.failure_of(blamed, f"could not be started: {blamed.state.error}", cause.fix if cause else "")


def own_error(run: EndedRun) -> Failure | None:
    """Of a program that failed by itself."""
    blamed = run.blamed
    return _of_program(blamed, run.known) if blamed and not diagnose.is_victim(blamed) else None


def unrecorded(run: EndedRun) -> Failure | None:
    """No node failed, and of one it is not known; unless it says that it lost a node that is missing."""
    unknown = next((each for each in run.evidence if each.state.exit_code is None), None)
    if run.failed or unknown is None or (run.missing and diagnose.is_victim(unknown)):
        return None
    what = "ended without a record of its exit code, so it is unknown whether its program was successful"
    fix = f"before you use its results, check its output: {diagnose.LOGS}{unknown.node.name}.log"
    return Failure(unknown.node.name, None, None, what, fix, "")


def missing_node(run: EndedRun) -> Failure | None:
    """A node of which less is known: the others are at most its victims."""
    return next(iter(run.missing.values()), None)


def killed_before_all(run: EndedRun) -> Failure | None:
    """The others, whatever their exit codes, ended after it."""
    killed = diagnose.killed_first(run.failed)
    if killed is None or killed.ended_at[0] > min(each.ended_at[0] for each in run.evidence):
        return None
    return _of_program(killed, run.known)


def left_early(run: EndedRun) -> Failure | None:
    return diagnose.failure_of_early_exit(run.blamed, run.evidence) if run.blamed else None


def only_victims(run: EndedRun) -> Failure | None:
    """Of the one that was killed before the others failed, else the first one says what it lost."""
    blamed = diagnose.killed_first(run.failed) or run.blamed
    return _of_program(blamed, run.known) if blamed else None


Explanation = Callable[[EndedRun], Failure | None]
CAUSES: Sequence[Explanation] = (
    suspended,
    hung,
    by_its_cluster,
    out_of_memory,
    at_time_limit,
    not_started,
    own_error,
    unrecorded,
    missing_node,
    killed_before_all,
    left_early,
    only_victims,
)


def first_failure(run: EndedRun) -> Failure | None:
    """Return the failure that caused the others; None if no cause applies, as every container exited with code 0."""
    return _first(CAUSES, run)


def _first(causes: Sequence[Explanation], run: EndedRun) -> Failure | None:
    return next((found for cause in causes if (found := cause(run))), None)


def of_cluster(host: str) -> Sequence[Explanation]:
    """Return what a feature knows of the ends of runs there; () for a machine."""
    if cluster_name(host) is None:
        return ()
    entries = [entry for feature in features.FEATURES.values() for entry in feature.causes.values()]
    return [cause for entry in entries for cause in features.load(entry)]


def _of_program(evidence: Evidence, known: Mapping[str, str]) -> Failure:
    """Return how a node's program ended, with a known cause or else its own error."""
    what, fix, output = diagnose.ending(evidence), "", diagnose.own_output(evidence)
    rank = diagnose.failing_rank(evidence)
    log = evidence.rank_logs.get(rank, evidence.log) if rank is not None else evidence.log
    about = {**known, "node": evidence.node.name, "code": str(diagnose.exit_code(evidence))}
    if (cause := cause_of_output(output, f"{log}\n{evidence.nccl}", about)) or (cause := cause_of_report(SIGNAL, what)):
        what, fix = f"{what}: {cause.what}", cause.fix
    elif named := error_line(output)[:LONGEST_ERROR]:
        what = f"{what}: {named}"
    elif rank is not None and (rank, 1) in evidence.last.failed and (last := _last_line(log)):
        # what sys.exit("text") prints, or else what was printed before
        what = f"{what}; its last line: {last}"
    return diagnose.failure_of(evidence, what, fix, output)


def _last_line(log: str) -> str:
    """Return the last line of a rank's log, printable and bounded; "" for an empty log."""
    line = log.rstrip()[-LONGEST_ERROR:].rpartition("\n")[2]
    return "".join(char if char.isprintable() else " " for char in line).strip()


# --- refinements: what is known beyond the files of the node that failed


def collectives(failure: Failure, run: EndedRun, attached: Attached) -> Failure:
    """Name the collectives and ranks that the ranks wait for, if they recorded them."""
    if failure.exit_code != HANG_CODE and not collective_failed(run.evidence):
        return failure
    since = {one.node.name: one.last.started for one in run.evidence}
    if not (files := report.recordings(attached.record.paths.root, since)):
        return failure
    names = {rank: one.node.name for one in run.evidence for rank in one.node.ranks}
    node = run.evidence[0].node
    engine, spec = attached.engines[node.name], attached.record.container(node.rank)
    found, what = report.explain_recordings(engine, node, spec, files, names), failure.what
    if any(sentence.startswith(report.OTHERS_WAIT) for sentence in found):  # more precise than the stacks
        what = what.partition(f"; {report.OTHERS_WAIT}")[0]
    return replace(failure, what="; ".join([what, *found]))


def full_disk(failure: Failure, run: EndedRun, attached: Attached) -> Failure:
    """Name the output folder's disk if it has no room or no inodes, and the program did not name it or left no error
    (its log is on this disk, too), or if it is mounted noexec and an executable file was refused.
    """
    node, full, words = run.by_node[failure.node].node, disk.full(disk.OUTPUT), failure.what
    unnamed = next((text for text in (full.what, disk.full().what) if text in words), "")
    refused = NOT_EXECUTABLE in words
    failed = failure.exit_code not in (0, HANG_CODE, TIMEOUT_CODE)
    said_nothing = failed and not failure.cure and not error_text(failure.words)
    if not (unnamed or refused or said_nothing):
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


def left_out(failure: Failure, run: EndedRun, attached: Attached) -> Failure:
    """Say of a module or file that it missed, and that exists here, why the program did not find it."""
    hint = missing_here(failure.words, attached.record, run.by_node[failure.node].node.rank)
    return replace(failure, cure=hint) if hint else failure


def leftover(failure: Failure, run: EndedRun, attached: Attached) -> Failure:
    """Name the file that an earlier process left in the machine's shared memory, if the program could not create it."""
    found, failed = _EXISTS.search(failure.words), run.by_node[failure.node]
    node = failed.node
    ipc = attached.record.container(node.rank).get("docker", {}).get("ipc", "host")
    if found is None or ipc != "host":
        return failure
    engine = attached.engines[node.name]
    old = [each for each in engine.shared_memory(0.0) if each.changed < failed.state.started]
    left = next((each for each in old if each.name in (found[1], f"sem.{found[1]}")), None)
    if left is None or runs_there(engine):
        return failure
    what = f"{failure.what}; an earlier process left /dev/shm/{left.name} ({size_text(left.size)}) there"
    return replace(failure, what=what, cure=f"remove it: on {node.name}, rm -r /dev/shm/{left.name}; {_CLEAN}")


def too_few_nodes(failure: Failure, run: EndedRun, attached: Attached) -> Failure:
    """Say why the other nodes of a run with min_nodes have not gone on, unless they said another reason."""
    least = attached.record.min_nodes
    if not least or any(each.give_up_reason for each in run.evidence):
        return failure
    return replace(failure, what=f"{failure.what}; fewer than {least} nodes (min_nodes) were left")


def reboot(failure: Failure, run: EndedRun, attached: Attached) -> Failure:
    """Name instead a machine that has restarted: that of the failure, or another one if this is of a victim."""
    found = resumable.restarted(attached, run.evidence)
    named = found is not None and (found.node == failure.node or diagnose.is_victim(run.by_node[failure.node]))
    return found if found and named else failure


def own_command(failure: Failure, _run: EndedRun, attached: Attached) -> Failure:
    """Name the run's own command and files in the fix."""
    cure = failure.cure.replace(diagnose.LOGS, f"runs/{attached.record.run}/logs/")
    if resumable.COMMAND in cure:
        cure = cure.replace(resumable.COMMAND, resumable.command_of(attached.record))
    return replace(failure, cure=cure)


@dataclass(frozen=True)
class Refinement:
    """What is added to a failure, whose node is in `by_node`. An error of it is a warning: unknown, and the error."""

    refine: Callable[[Failure, EndedRun, Attached], Failure]
    unknown: str
    of_missing: bool = False  # also added to the failure of a node that is missing


REFINEMENTS: Sequence[Refinement] = (
    Refinement(collectives, "what the ranks waited for is not known"),
    Refinement(full_disk, "whether a disk is full is not known"),
    Refinement(left_out, "whether a file was left out of the code is not known"),
    Refinement(leftover, "what is left in shared memory is not known"),
    Refinement(reboot, "whether a machine has restarted is not known"),
    Refinement(too_few_nodes, "why the other nodes have not gone on is not known", of_missing=True),
    Refinement(own_command, "the command that resumes the run is not known", of_missing=True),
)


def explain(run: EndedRun, attached: Attached, warn: Callable[[str], object]) -> Failure | None:
    """Return why a run failed; None if no cause is known. warn: called with each error on the way."""
    plainly = _plainly(run.evidence)
    failure = warn_on_error("why the run failed could not be read", partial(first_failure, run), plainly, warn)
    for each in REFINEMENTS:
        if failure is not None and (failure.node in run.by_node or each.of_missing):
            failure = warn_on_error(each.unknown, partial(each.refine, failure, run, attached), failure, warn)
    return failure


def _plainly(evidence: Sequence[Evidence]) -> Failure | None:
    """Return the first node that failed, without a reason."""
    failed = [(own.node.name, own.state.exit_code) for own in evidence if own.state.exit_code not in (0, None)]
    return next((Failure(name, None, code, f"exited with code {code}", "", "") for name, code in failed), None)
