"""Why Slurm has ended a run, or started no program on one of its machines, and the fix. queue.py says how it ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from launcher.run.end.diagnose import did_not_start, failure_of
from launcher.run.end.explain import EndedRun, Explanation
from launcher.run.end.resumable import COMMAND
from launcher.run.result import Failure
from launcher.run.state import SIGKILL_CODE, SIGTERM_CODE

_RESUME = f"resume from its last checkpoint: {COMMAND}"
_AGAIN = f"{_RESUME}; with `restarts` set, Slurm restarts such a job automatically"
_FIXES = {  # by Slurm's job state
    "TIMEOUT": f"raise `time` of the cluster, or `timeout` of the job; {_RESUME}",
    "DEADLINE": _RESUME,
    "CANCELLED": _RESUME,
    "OUT_OF_MEMORY": "make the program use less memory, or raise resources.memory",
    "NODE_FAIL": _AGAIN,
    "BOOT_FAIL": _AGAIN,
    "PREEMPTED": _AGAIN,
}
# A task that ended before the node's program started, or the batch script
_UNSTARTED = re.compile(
    r"(?:its task|its batch script could not write to .*?|job \S+: \w+ \(JobLaunchFailure\))"
    r"(?: on (\S+))?(?: exited .*)?"
)
_SEES = "check whether {} sees the cluster's workdir and can write there: launcher doctor JOB --on CLUSTER"


def ended_by_slurm(run: EndedRun) -> Failure | None:
    blamed = run.blamed
    found = re.match(r"was ended by Slurm: job \S+ (\w+)", blamed.state.error) if blamed else None
    if blamed is None or found is None:
        return None
    # What the program printed when it was stopped is not the reason
    return replace(failure_of(blamed, blamed.state.error, _FIXES.get(found[1], ""), ""), rank=None)


def not_started(run: EndedRun) -> Failure | None:
    blamed = run.blamed
    found = _UNSTARTED.fullmatch(blamed.state.error) if blamed else None
    if blamed is None or found is None:
        return None
    return failure_of(blamed, f"could not be started: {blamed.state.error}", _sees(found[1]))


def without_a_word(run: EndedRun) -> Failure | None:
    blamed = run.blamed
    if blamed is None or not did_not_start(blamed) or blamed.state.exit_code not in (SIGTERM_CODE, SIGKILL_CODE):
        return None
    return failure_of(blamed, "did not start its program", _sees(None))


CAUSES: Sequence[Explanation] = (ended_by_slurm, not_started, without_a_word)


def _sees(machine: str | None) -> str:
    """Return the fix for a machine that started nothing. machine: its name, if it is known."""
    only = (
        f" --set nodes=1 --set 'cluster.options=[--nodelist={machine}]'"
        if machine and re.fullmatch(r"[\w.-]+", machine)
        else ""
    )
    return _SEES.format(machine or "its machine") + only
