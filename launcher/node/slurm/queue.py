"""State of our jobs on a cluster: one script reads the queue and the runs' own files; parser of its output."""

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
COMMENT = "launcher"  # of a job, before the run's ID, so that it is found without a record
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_KILLED, _TIMEOUT = 137, 124
# Why Slurm ended a job. If a job has FAILED, its nodes report why.
_BY_SLURM = {
    "TIMEOUT": "at its time limit",
    "DEADLINE": "at its deadline",
    "CANCELLED": "by scancel",
    "OUT_OF_MEMORY": "a process used more memory than the job asked for",
    "NODE_FAIL": "Slurm lost one of its machines",
    "BOOT_FAIL": "one of its machines did not boot",
    "PREEMPTED": "another job took its machines",
}
# Texts of slurmstepd.
_IN_ITS_LOG = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL"}

# $1: a marker. $2: the folder of all runs, $3: a run, or * for all. For a single run, prints how Slurm ended it: the
# accounting has the user, and keeps a job longer than squeue, which drops it after minutes; without accounting, the end
# is in the job's own output.
ASK = r"""
echo "$1 queue"
queue=$(squeue -h -r -t all -u "$(id -u)" -o '%i|%T|%r|%k') || exit 9
printf '%s\n' "$queue"
print_end() {
  state=$(printf '%s\n' "$queue" | sed -n "s/^$2|\([A-Z_]*\)|.*/\1/p")
  case $state in '' | CANCELLED) ;; *) return ;; esac
  ended=$(timeout 5 sacct -n -X -P -j "$2" -o State 2>/dev/null | tail -n 1)
  by=${ended##*CANCELLED by }
  [ "$by" = "$ended" ] || ended="CANCELLED by $(id -nu "$by" 2>/dev/null || echo "uid $by")"
  echo "$ended"
  grep -a '^slurmstepd: error: [*][*][*] .* DUE TO ' "$1/logs/slurm.log" 2>/dev/null | tail -n 1
}
for folder in "$2"/$3/; do
  [ -f "$folder.node/spec.json" ] || continue
  echo; echo "$1 spec"; cat "$folder.node/spec.json"
  id=$(cat "$folder.node/submitted" 2>/dev/null)
  echo; echo "$1 submitted"; echo "$id"
  [ "$3" = "*" ] || [ -z "$id" ] || { echo "$1 over"; print_end "$folder" "${id%%;*}"; }
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
    """A run of the user: its job, None if Slurm does not list it, and the contents of its own files."""

    spec: Mapping[str, Any]
    job: Job | None
    submitted: str  # the job's ID, "" before
    over: str  # how Slurm ended a job that left the queue, from its accounting and the job's output
    end: tuple[int, float, str] | None  # the script's exit code, its time, and the job state that the script expected
    attempts: Mapping[int, tuple[float, int | None, float]]  # by node rank: last start, exit code, its time

    @property
    def run_labels(self) -> labels.RunLabels:
        """The labels of its first node."""
        return labels.read(self.spec["labels"])

    def states(self) -> list[ContainerState]:
        """Return the state of each node of the run, by rank; labels are those of the first node, with its own rank."""
        phase, ended_by = self.phase, self.ended_by
        codes = [self._code(rank) for rank in range(self.run_labels.nodes)]
        failed = any(code for _, code, _ in self.attempts.values())
        if failed:  # srun has killed the nodes that had not started
            codes = [code if rank in self.attempts else _KILLED for rank, code in enumerate(codes)]
        elif not any(codes) and (code := self._job_code()):
            codes[0] = code  # the script itself failed, or was killed, and no node has an exit code
        states = [self._state(phase, rank, code, failed) for rank, code in enumerate(codes)]
        if ended_by and phase.ended:
            states[0] = replace(states[0], error=f"was ended by Slurm: {ended_by}")
        return states

    @property
    def ended_by(self) -> str:
        """`job 12: TIMEOUT, at its time limit` if Slurm ended the job; "" if it exited on its own, or is running."""
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
        logged = [name for text, name in _IN_ITS_LOG.items() if f"DUE TO {text}" in self.over and self.end is None]
        known = [self.job.state] if self.job else [self.over.partition(" ")[0].partition("\n")[0], *logged]
        expected = self.end[2] if self.end else ""
        return next((state for state in (*known, expected) if state in _BY_SLURM), "")

    def _state(self, phase: Phase, rank: int, code: int, failed: bool) -> ContainerState:
        """failed: whether any node's program has exited with a code other than 0."""
        started, _, finished = self.attempts.get(rank, (0.0, None, 0.0))
        show_job = self.job is not None and (self.job.waits or not (started or failed))
        count = len(self.run_labels.ranks)
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
            error=str(self.job) if show_job else "",
        )

    @property
    def phase(self) -> Phase:
        """The phase of the run: Slurm starts and stops its nodes together."""
        if self.job is None:
            return Phase.EXITED if self.submitted else Phase.CREATED
        if self.job.waits:
            return Phase.RESTARTING if self.attempts else Phase.CREATED
        return Phase.EXITED if self.job.ended else Phase.RUNNING

    def _code(self, rank: int) -> int:
        """Return a node's exit code, 137 if it did not exit on its own."""
        _, code, _ = self.attempts.get(rank, (0.0, 0, 0.0))
        return _KILLED if code is None else code

    def _job_code(self) -> int:
        """Return the job's exit code, 0 if the run was successful."""
        state = self._slurms_end()
        if self.end is not None and not state:
            return self.end[0]
        known = {"COMPLETED": 0, "TIMEOUT": _TIMEOUT, "DEADLINE": _TIMEOUT}
        return known.get(state or (self.job.state if self.job else ""), _KILLED)


def parse(text: str, marker: str) -> Iterator[RunInQueue]:
    """Parse the output of ASK. Other lines, and files in an unknown format, are ignored."""
    _, *parts = text.split(f"{marker} ")
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
    """Yield jobs by run, the last of several in queue order; and by ID, as the runs of a sweep share a comment."""
    for line in text.splitlines():
        number, state, reason, comment = [*line.split("|"), "", "", ""][:4]
        first, _, run = comment.partition(" ")
        if first == COMMENT and re.fullmatch(r"[0-9_]{1,24}", number):
            job = Job(number, state, reason)
            yield from ((run, job), (number, job))


def _spec(text: str) -> Mapping[str, Any]:
    """Parse a run's description; {} if its format is unknown."""
    try:
        found = json.loads(text)
        labels.read(found["labels"])
    except (ValueError, LookupError, TypeError):
        return {}
    as_written = isinstance(found.get("name"), str) and isinstance(found.get("sweep"), list)
    return found if as_written else {}


def _last_attempts(text: str) -> dict[int, tuple[float, int | None, float]]:
    """Return by node rank: when its last attempt started; its exit code and time, if it has exited."""
    found: dict[int, tuple[float, int | None, float]] = {}
    pattern = r"^(?:node-(\d{1,5})\.attempts:)(?:start|exit (\d{1,3})) (\d{1,12})$"
    for node, code, moment in re.findall(pattern, text, re.MULTILINE):
        rank = int(node)
        if not code:
            found[rank] = (float(moment), None, 0.0)
        elif rank in found:
            found[rank] = (found[rank][0], int(code), float(moment))
    return found
