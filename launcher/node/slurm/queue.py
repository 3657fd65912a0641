"""What the login machine tells of our jobs: one script for the queue and for the runs' own files, and its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.model import labels
from launcher.model.container import ContainerState, Phase

NODES = ".node"  # in a run's output folder, as with plain processes
SPEC, SUBMITTED, SCRIPT = "spec.json", "submitted", "job.sh"
COMMENT = "launcher"  # of a job, before the run's id: so it is found without a record
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_KILLED, _TIMEOUT = 137, 124

# $1: a mark. $2: the folder of all runs, $3: a run, or * for all.
ASK = r"""
echo "$1 queue"
squeue -h -r -t all -u "$(id -u)" -o '%i|%T|%r|%k' || exit 9
for folder in "$2"/$3/; do
  [ -f "$folder.node/spec.json" ] || continue
  echo; echo "$1 spec"; cat "$folder.node/spec.json"
  echo; echo "$1 submitted"; cat "$folder.node/submitted" 2>/dev/null
  echo "$1 end"; cat "$folder/state/slurm.end" 2>/dev/null
  for file in "$folder"state/node-*.attempts; do
    [ -f "$file" ] || continue
    echo "$1 attempts ${file##*/}"; grep -E '^(start|exit) ' "$file" | tail -n 2
  done
done
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
    end: tuple[int, float] | None  # the script's exit code, and when
    attempts: Mapping[int, tuple[float, int | None, float]]  # by node rank: last start, exit code, its time

    @property
    def told(self) -> labels.RunLabels:
        """Of its first node."""
        return labels.read(self.spec["labels"])

    def states(self) -> list[ContainerState]:
        """A state for each node of the run, by rank; its labels are those of the first, with its own rank."""
        codes = [self._code(rank) for rank in range(self.told.nodes)]
        if not any(codes) and (code := self._job_code()):
            codes[0] = code  # the script itself failed, or was ended, and no node tells
        return [self._state(rank, code, len(self.told.ranks)) for rank, code in enumerate(codes)]

    def _state(self, rank: int, code: int, count: int) -> ContainerState:
        phase = self.phase
        started, _, finished = self.attempts.get(rank, (0.0, None, 0.0))
        telling = self.job is not None and (self.job.waits or not started)
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
        if self.end is not None:
            return self.end[0]
        known = {"COMPLETED": 0, "TIMEOUT": _TIMEOUT, "DEADLINE": _TIMEOUT}
        return known.get(self.job.state if self.job else "", _KILLED)


def parse(text: str, mark: str) -> Iterator[RunInQueue]:
    """What ASK printed. Other lines, and files that are not as we write them, are ignored."""
    _, *parts = text.split(f"{mark} ")
    jobs = dict(_jobs(parts[0])) if parts else {}
    runs: list[dict[str, Any]] = []
    for part in parts[1:]:
        kind, _, rest = part.partition("\n")
        if kind == "spec":
            runs.append({"spec": _spec(rest), "submitted": "", "end": None, "attempts": {}})
        elif kind == "submitted":
            runs[-1]["submitted"] = rest.strip()
        elif kind == "end":
            found = re.fullmatch(r"(\d{1,3}) (\d{1,12})", rest.strip())
            runs[-1]["end"] = (int(found[1]), float(found[2])) if found else None
        elif (name := re.fullmatch(r"attempts node-(\d{1,5})\.attempts", kind)) and (last := _last_attempt(rest))[0]:
            runs[-1]["attempts"][int(name[1])] = last
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


def _last_attempt(text: str) -> tuple[float, int | None, float]:
    """When it started; its exit code, and when, where it has ended."""
    started, code, finished = 0.0, None, 0.0
    for found in re.finditer(r"^(?:start|exit (\d{1,3})) (\d{1,12})$", text, re.MULTILINE):
        if found[1] is None:
            started, code, finished = float(found[2]), None, 0.0
        else:
            code, finished = int(found[1]), float(found[2])
    return started, code, finished
