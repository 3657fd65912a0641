"""What the login machine tells of our jobs: one script for the queue and for the runs' own files, and its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.model import labels
from launcher.model.container import ContainerState, Phase

NODES = ".node"  # in a run's output folder, as with plain processes
SPEC, SUBMITTED, SCRIPT = "spec.json", "submitted", "job.sh"
COMMENT = "launcher"  # of a job, before the run's id: so it is found without a record
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_KILLED, _TIMEOUT = 137, 124
# What Slurm does to a job; of one that has FAILED, its nodes tell why.
_BY_SLURM = {
    "TIMEOUT": "at its time limit",
    "DEADLINE": "at its deadline",
    "CANCELLED": "by scancel",
    "OUT_OF_MEMORY": "a process used more memory than the job asked for",
    "NODE_FAIL": "Slurm lost one of its machines",
    "BOOT_FAIL": "one of its machines did not boot",
    "PREEMPTED": "another job took its machines",
}
_IN_ITS_LOG = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL"}  # slurmstepd's words

# $1: a mark. $2: the folder of all runs, $3: a run, or * for all. Of one run, how Slurm ended it: its accounting knows
# by whom, and does not forget it after minutes as squeue does; without accounting, the job's own output tells.
ASK = r"""
echo "$1 queue"
queue=$(squeue -h -r -t all -u "$(id -u)" -o '%i|%T|%r|%k') || exit 9
printf '%s\n' "$queue"
tell_end() {
  state=$(printf '%s\n' "$queue" | sed -n "s/^$2|\([A-Z_]*\)|.*/\1/p")
  case $state in '' | CANCELLED) ;; *) return ;; esac
  said=$(timeout 5 sacct -n -X -P -j "$2" -o State 2>/dev/null | tail -n 1)
  by=${said##*CANCELLED by }
  [ "$by" = "$said" ] || said="CANCELLED by $(id -nu "$by" 2>/dev/null || echo "uid $by")"
  echo "$said"
  grep -a '^slurmstepd: error: [*][*][*] .* DUE TO ' "$1/logs/slurm.log" 2>/dev/null | tail -n 1
}
for folder in "$2"/$3/; do
  [ -f "$folder.node/spec.json" ] || continue
  echo; echo "$1 spec"; cat "$folder.node/spec.json"
  id=$(cat "$folder.node/submitted" 2>/dev/null)
  echo; echo "$1 submitted"; echo "$id"
  [ "$3" = "*" ] || [ -z "$id" ] || { echo "$1 over"; tell_end "$folder" "${id%%;*}"; }
  echo "$1 end"; cat "$folder/state/slurm.end" 2>/dev/null
  echo "$1 attempts"
  (cd "${folder}state" 2>/dev/null && grep -HE '^(start|exit) ' node-*.attempts 2>/dev/null)
done
exit 0
"""


@dataclass(frozen=True)
class Job:
    """A job of the queue."""

    id: str
    state: str
    reason: str

    @property
    def waits(self) -> bool:
        return self.state in _WAITING

    @property
    def ended(self) -> bool:
        return self.state not in (*_WAITING, *_RUNNING)

    def __str__(self) -> str:
        return f"job {self.id}: {self.state}" + (f" ({self.reason})" if self.reason not in ("", "None") else "")


@dataclass(frozen=True)
class RunInQueue:
    """A run of ours: its job, None where Slurm does not know it, and what its own files say."""

    spec: Mapping[str, Any]
    job: Job | None
    submitted: str  # the job's id, "" before
    over: str  # how Slurm ended a job that is not in the queue any more, as its accounting and the job's output tell
    end: tuple[int, float, str] | None  # the script's exit code, and when; the state that it foresaw
    attempts: Mapping[int, tuple[float, int | None, float]]  # by node rank: last start, exit code, its time

    @property
    def told(self) -> labels.RunLabels:
        """Of its first node."""
        return labels.read(self.spec["labels"])

    def states(self) -> list[ContainerState]:
        """A state for each node of the run, by rank; its labels are those of the first, with its own rank."""
        told, phase, ended_by = self.told, self.phase, self.ended_by
        codes = [self._code(rank) for rank in range(told.nodes)]
        failed = any(code for _, code, _ in self.attempts.values())
        if failed:  # srun has ended the nodes that had not begun
            codes = [code if rank in self.attempts else _KILLED for rank, code in enumerate(codes)]
        elif not any(codes) and (code := self._job_code()):
            codes[0] = code  # the script itself failed, or was ended, and no node tells
        states = [self._state(phase, rank, code, failed) for rank, code in enumerate(codes)]
        if ended_by and phase.ended:
            states[0] = replace(states[0], error=f"was ended by Slurm: {ended_by}")
        return states

    @property
    def ended_by(self) -> str:
        """`job 12: TIMEOUT, at its time limit` if Slurm has ended the job; "" if it ended by itself, or goes on."""
        state = self._slurms_end()
        if not state:
            return ""
        who = re.search(r"^CANCELLED by ([!-~ ]{1,80})$", self.over, re.MULTILINE) if state == "CANCELLED" else None
        number = self.job.id if self.job else self.submitted.partition(";")[0]
        return f"job {number}: {state}, {f'by {who[1]}' if who else _BY_SLURM[state]}"

    def _slurms_end(self) -> str:
        """One of _BY_SLURM, or ""."""
        if self.job is not None and not self.job.ended:
            return ""
        logged = [name for words, name in _IN_ITS_LOG.items() if f"DUE TO {words}" in self.over and self.end is None]
        known = [self.job.state] if self.job else [self.over.partition(" ")[0].partition("\n")[0], *logged]
        foreseen = self.end[2] if self.end else ""
        return next((state for state in (*known, foreseen) if state in _BY_SLURM), "")

    def _state(self, phase: Phase, rank: int, code: int, failed: bool) -> ContainerState:
        """failed: whether any node's program has ended with an exit code other than 0."""
        started, _, finished = self.attempts.get(rank, (0.0, None, 0.0))
        telling = self.job is not None and (self.job.waits or not (started or failed))
        count = len(self.told.ranks)
        own = {labels.NODE: f"node-{rank}", labels.NODE_RANK: str(rank), labels.RANKS: f"{rank * count}+{count}"}
        name = f"{self.spec['name'].rpartition('-')[0]}-{rank}"
        return ContainerState(
            id=name,
            name=name,
            image="",
            labels={**self.spec["labels"], **own},
            phase=phase,
            exit_code=code if phase.ended else None,
            oom_killed=phase.ended and self.job is not None and self.job.state == "OUT_OF_MEMORY",
            started=started,
            finished=finished or (self.end[1] if self.end else 0.0),
            error=str(self.job) if telling else "",
        )

    @property
    def phase(self) -> Phase:
        """Of the run as a whole: Slurm starts and ends its nodes together."""
        if self.job is None:
            return Phase.EXITED if self.submitted else Phase.CREATED
        if self.job.waits:
            return Phase.RESTARTING if self.attempts else Phase.CREATED
        return Phase.EXITED if self.job.ended else Phase.RUNNING

    def _code(self, rank: int) -> int:
        """Of a node that did not come to its own end, 137."""
        _, code, _ = self.attempts.get(rank, (0.0, 0, 0.0))
        return _KILLED if code is None else code

    def _job_code(self) -> int:
        """0 where the run has ended well."""
        state = self._slurms_end()
        if self.end is not None and not state:
            return self.end[0]
        known = {"COMPLETED": 0, "TIMEOUT": _TIMEOUT, "DEADLINE": _TIMEOUT}
        return known.get(state or (self.job.state if self.job else ""), _KILLED)


def parse(text: str, mark: str) -> Iterator[RunInQueue]:
    """What ASK printed. Other lines, and files that are not as we write them, are ignored."""
    _, *parts = text.split(f"{mark} ")
    jobs = dict(_jobs(parts[0])) if parts else {}
    runs: list[dict[str, Any]] = []
    for part in parts[1:]:
        kind, _, rest = part.partition("\n")
        if kind == "spec":
            runs.append({"spec": _spec(rest), "submitted": "", "over": "", "end": None, "attempts": {}})
        elif kind in ("submitted", "over"):
            runs[-1][kind] = rest.strip()
        elif kind == "end":
            found = re.fullmatch(r"(\d{1,3}) (\d{1,12}) ?([A-Z]{0,20})", rest.strip())
            runs[-1]["end"] = (int(found[1]), float(found[2]), found[3]) if found else None
        elif kind == "attempts":
            runs[-1]["attempts"] = _last_attempts(rest)
    for run in runs:
        if run["spec"]:
            yield RunInQueue(job=jobs.get(run["spec"]["labels"][labels.RUN]) or jobs.get(run["submitted"]), **run)


def _jobs(text: str) -> Iterator[tuple[str, Job]]:
    """By run, of several the last in the queue's order; and by id, as a sweep has one comment for all of its runs."""
    for line in text.splitlines():
        number, state, reason, comment = [*line.split("|"), "", "", ""][:4]
        word, _, run = comment.partition(" ")
        if word == COMMENT and re.fullmatch(r"[0-9_]{1,24}", number):
            job = Job(number, state, reason)
            yield from ((run, job), (number, job))


def _spec(text: str) -> Mapping[str, Any]:
    """{} where it is not as we write it."""
    try:
        found = json.loads(text)
        labels.read(found["labels"])
    except (ValueError, LookupError, TypeError):
        return {}
    as_written = isinstance(found.get("name"), str) and isinstance(found.get("sweep"), list)
    return found if as_written else {}


def _last_attempts(text: str) -> dict[int, tuple[float, int | None, float]]:
    """By node rank: when its last attempt started; its exit code, and when, where it has ended."""
    found: dict[int, tuple[float, int | None, float]] = {}
    pattern = r"^(?:node-(\d{1,5})\.attempts:)(?:start|exit (\d{1,3})) (\d{1,12})$"
    for node, code, moment in re.findall(pattern, text, re.MULTILINE):
        rank = int(node)
        if not code:
            found[rank] = (float(moment), None, 0.0)
        elif rank in found:
            found[rank] = (found[rank][0], int(code), float(moment))
    return found
