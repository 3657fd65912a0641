"""State of our jobs on a cluster: one script reads the queue and the runs' own files; parser of its output."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import RunId
from launcher.node.opened import BELOW

NODES = ".node"  # in a run's output folder, as with plain processes
SPEC, SUBMITTED, SCRIPT = "spec.json", "submitted", "job.sh"
ARRAY = "array.sh"  # the script of a sweep, in the folder of its last run
COMMENT = "launcher"  # of a job, before the run's ID; a site or a program may change it
_WAITING = (
    *("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING"),
    *("POWER_UP_NODE", "EXPEDITING"),
)
_ENDED = (  # a job in any other state, also one that a later Slurm adds, is running
    *("COMPLETED", "FAILED", "TIMEOUT", "DEADLINE", "CANCELLED", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL"),
    *("PREEMPTED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
)
_KILLED, _TIMEOUT = 137, 124
_NOT_WRITTEN = 73  # exit code of the script if it could not write a file
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
# Reasons to wait that do not pass by themselves, and what to do.
_OFFERS = "`sinfo -o '%P %a %l %D %c %m %G %f'` shows what there is"
_NOT_ALLOWED = (
    "the QOS or the account allows no such job: `sacctmgr show qos` and `sacctmgr show assoc` show the limits"
)
_ADVICE = {
    "PartitionConfig": f"the partition has no machines, or too few, that are what the job asks for: {_OFFERS}",
    "PartitionNodeLimit": f"the partition allows fewer nodes, or some of them are down: {_OFFERS}",
    "BadConstraints": f"no machines are what `options` ask for: {_OFFERS}",
    "MaxMemPerLimit": "the cluster allows less memory: lower resources.memory",
    "(Partition|QOS|Association)TimeLimit|(QOS|Assoc)MaxWallDurationPerJobLimit": "its time limit is longer than "
    "allowed: lower `time` of the cluster, or `timeout` of the job",
    "(QOS|Assoc)Max.*Per(Job|Node).*|QOSMin.*": _NOT_ALLOWED,
    "(Account|QOS)NotAllowed|Invalid(Account|QOS)": "set `account` and `qos` of the cluster",
    "DependencyNeverSatisfied": "the job that it waits for has failed",
    "JobHeldUser": "release it: scontrol release {id}",
    "JobHeldAdmin": "only an administrator can release it",
    "JobHoldMaxRequeue|.*requeued (in )?held.*": "if a machine could not start it, check whether all of them see the "
    "cluster's workdir: launcher doctor JOB --on CLUSTER; then release it: scontrol release {id}",
}
# Texts of slurmstepd.
_IN_ITS_LOG = {"TIME LIMIT": "TIMEOUT", "PREEMPTION": "PREEMPTED", "NODE FAILURE": "NODE_FAIL"}

# First in every script that calls Slurm's commands, which take variables of the caller's shell for options:
# SQUEUE_PARTITION hides the jobs of other partitions. Some of those for sbatch remain: options override them, so they
# are defaults. In a job, SLURM_ variables describe that job.
PLAIN = r"""
for our_name in $(env | sed -n 's/^\(S[A-Z]*_[A-Z0-9_]*\)=.*/\1/p'); do
  case $our_name in
  SBATCH_ACCOUNT | SBATCH_PARTITION | SBATCH_QOS | SBATCH_RESERVATION | SBATCH_CONSTRAINT | SBATCH_TIMELIMIT) ;;
  SBATCH_WCKEY | SLURM_CONF | SLURM_CONF_SERVER | SLURM_JOB_ID) ;;
  SBATCH_* | SQUEUE_* | SCANCEL_* | SACCT_* | SLURM_CLUSTERS | SLURM_HINT) unset "$our_name" ;;
  SLURM_* | SRUN_*) [ -z "${SLURM_JOB_ID-}" ] || unset "$our_name" ;;
  esac
done
unset SLURM_JOB_ID
"""
# $1: a marker. $2: the folder of all runs, $3: a run, or * for all. For a single run, prints how Slurm ended it: the
# accounting has the user and the exit code, and keeps a job longer than squeue, which drops it after minutes; without
# accounting, the end is in the job's own output. Of attempts, which thousands of nodes may have, only lines of this
# form are printed; -D: not of a FIFO or a device.
ASK = rf"""
{PLAIN}{BELOW}
echo "$1 queue"
queue=$(squeue -h -a -r -t all -u "$(id -u)" -o '%i|%T|%r|%o|%k') || exit 9
printf '%s\n' "$queue"
print_end() {{
  shown=
  state=$(printf '%s\n' "$queue" | sed -n "s/^$1|\([A-Z_]*\)|.*/\1/p")
  case $state in
  '' | CANCELLED)
    ended=$(timeout 5 sacct -n -X -P -j "$1" -o State,ExitCode 2>/dev/null | tail -n 1)
    code=${{ended##*|}} ended=${{ended%%|*}} by=${{ended##*CANCELLED by }}
    [ "$by" = "$ended" ] || ended="CANCELLED by $(id -nu "$by" 2>/dev/null || echo "uid $by")"
    ;;
  COMPLETED | FAILED)
    shown=$(scontrol -o show job "$1" 2>/dev/null)
    ended=$state code=$(printf '%s\n' "$shown" | sed -n 's/.* ExitCode=\([0-9:]*\).*/\1/p') ;;
  *) return ;;
  esac
  echo "$ended"
  echo "exit $code"
  printf '%s\n' "$shown" | sed -n 's/.* BatchHost=\([^ ]*\).*/host \1/p'
  below logs/slurm.log sed -n '/^srun: error: .*: Exited with exit code /p
    s/^slurmstepd: error: [*][*][*] .* DUE TO .*/again/p' 2>/dev/null | tail -n 2000
  below logs/slurm.log grep -a '^slurmstepd: error: [*][*][*] .* DUE TO ' 2>/dev/null | tail -n 1
}}
for folder in "$2"/$3/; do
  [ -f "$folder.node/spec.json" ] || continue
  at "$folder"
  echo; echo "$1 spec"; below .node/spec.json head -c 4194304 2>/dev/null
  id=$(below .node/submitted head -c 100 2>/dev/null)
  echo; echo "$1 submitted"; echo "$id"
  [ "$3" = "*" ] || [ -z "$id" ] || {{ echo "$1 over"; print_end "${{id%%;*}}"; }}
  echo "$1 end"; below state/slurm.end head -c 100 2>/dev/null
  echo "$1 attempts"
  (enter find state 2>/dev/null && grep -D skip -HE '^(start|exit) ' node-*.attempts 2>/dev/null)
done
exit 0
"""


# A job's script as squeue prints it, older versions with its arguments.
_OWN_SCRIPT = re.compile(
    rf"/.*?/(?P<run>[^/]+)/{re.escape(NODES)}/(?P<script>{re.escape(SCRIPT)}|{re.escape(ARRAY)})[ |]"
)
_OWN_COMMENT = re.compile(rf"\|{COMMENT} (\S+)$")
_OF_A_TASK = re.compile(
    r"^srun: error: ([A-Za-z0-9.,\[\]_-]{1,200}): tasks? ([0-9,-]{1,200}): Exited with exit code (\d{1,3})$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class QueuedJob:
    """A job of the queue."""

    id: str
    state: str
    reason: str
    command: str  # `<its script with arguments>|<comment>`; `(null)` in place of what Slurm does not know

    @property
    def waits(self) -> bool:
        return self.state in _WAITING

    @property
    def ended(self) -> bool:
        return self.state in _ENDED

    @property
    def advice(self) -> str:
        """What to do if it waits for something that does not pass by itself, else ""."""
        reason = self.reason.replace("_", " ")
        found = [text for pattern, text in _ADVICE.items() if self.waits and re.fullmatch(pattern, reason)]
        return found[0].format(id=self.id) if found else ""

    def __str__(self) -> str:
        return f"job {self.id}: {self.state}" + (f" ({self.reason})" if self.reason not in ("", "None") else "")


@dataclass(frozen=True)
class LastAttempt:
    """The last start of a node's program, and its end: times in seconds since the epoch, 0 if there was none yet."""

    started: float = 0.0
    code: int | None = None
    finished: float = 0.0


@dataclass(frozen=True)
class ScriptEnd:
    """What the batch script recorded at its end: its exit code, the time, and the job state that it expected, or ""."""

    code: int
    time: float
    expected: str


@dataclass(frozen=True)
class _Task:
    """What srun says of a node's task."""

    machine: str
    code: int

    @property
    def end(self) -> str:
        return f"its task on {self.machine} exited with code {self.code} before its program started"


@dataclass(frozen=True)
class RunInQueue:
    """A run of the user: its job, None if Slurm does not list it, and the contents of its own files."""

    spec: Mapping[str, Any]
    job: QueuedJob | None
    submitted: str  # the job's ID, "" before
    over: str  # how Slurm ended a job that left the queue, from its accounting and the job's output
    end: ScriptEnd | None
    attempts: Mapping[int, LastAttempt]  # by node rank, of nodes that have started

    @property
    def run_labels(self) -> labels.RunLabels:
        """The labels of its first node."""
        return labels.read(self.spec["labels"])

    def states(self) -> list[ContainerState]:
        """Return the state of each node of the run, by rank; labels are those of the first node, with its own rank.

        The exit code of an ended node is None if there is no evidence of how it ended.
        """
        unstarted = self._unstarted() if self.phase.ended else {}
        ranks = range(self.run_labels.nodes)
        recorded = [unstarted[rank].code if rank in unstarted else self._attempt(rank).code for rank in ranks]
        codes = self._exit_codes(recorded)
        return [self._state(rank, codes[rank], unstarted.get(rank), failed=any(recorded)) for rank in ranks]

    def _exit_codes(self, recorded: Sequence[int | None]) -> list[int | None]:
        """Return the exit codes of the nodes' containers. recorded: those of their programs, as far as known."""
        codes = [*recorded]
        if not any(recorded):  # the first node has the script's code, if that has failed or was killed
            codes[0] = self._job_code(complete=None not in recorded) or codes[0]
        if any(codes):  # srun or Slurm has killed the other nodes
            codes = [_KILLED if code is None else code for code in codes]
        return codes

    def _attempt(self, rank: int) -> LastAttempt:
        return self.attempts.get(rank, LastAttempt())

    def _unstarted(self) -> dict[int, _Task]:
        """Return what srun said of nodes that did not start their programs, by rank.

        Only the first of them: srun ends all others as soon as one fails.
        """
        last = self.over.rpartition("\nagain\n")[2]  # attempt
        for machine, ranks, code in _OF_A_TASK.findall(last):
            found = set[int]()
            for start, end in re.findall(r"(\d+)(?:-(\d+))?", ranks):
                found |= {*range(int(start), min(int(end or start) + 1, self.run_labels.nodes))}
            if found := found - self.attempts.keys():
                return dict.fromkeys(found, _Task(machine, int(code)))
        return {}

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
        """Return why Slurm ended the job, as in _BY_SLURM, or "": by the queue or the accounting, else by the state
        that the script expected, or by what the job's output says.
        """
        if self.job is not None and not self.job.ended:
            return ""
        states = [self.job.state if self.job else self.over.partition(" ")[0].partition("\n")[0]]
        if self.end is not None:
            states.append(self.end.expected)
        elif self.job is None:
            states += [state for text, state in _IN_ITS_LOG.items() if f"DUE TO {text}" in self.over]
        return next((state for state in states if state in _BY_SLURM), "")

    def _state(self, rank: int, code: int | None, task: _Task | None, *, failed: bool) -> ContainerState:
        """code: its exit code, once it has ended. failed: whether any node's program exited with another code than 0.

        task: of a node that did not start its program.
        """
        phase, last = self.phase, self._attempt(rank)
        count = len(self.run_labels.ranks)
        own = {labels.NODE: f"node-{rank}", labels.NODE_RANK: str(rank), labels.RANKS: f"{rank * count}+{count}"}
        name = f"{self.spec['name'].rpartition('-')[0]}-{rank}"
        error = self._error(rank, code, task, failed=failed)
        return ContainerState(
            id=name,
            name=name,
            image="",
            labels={**self.spec["labels"], **own},
            phase=phase,
            exit_code=code if phase.ended else None,
            oom_killed=phase.ended and self.job is not None and self.job.state == "OUT_OF_MEMORY",
            started=last.started,
            finished=last.finished or (self.end.time if self.end else 0.0),
            error=error,
            suspect=task is not None and error == task.end,  # srun ends all tasks as soon as one fails
        )

    def _error(self, rank: int, code: int | None, task: _Task | None, *, failed: bool) -> str:
        """Return what Slurm, srun or the queue say of a node, or "". Arguments as for _state."""
        ended = self.phase.ended
        if ended and rank == 0:  # the node of the batch script
            if self.ended_by:
                return f"was ended by Slurm: {self.ended_by}"
            if code == _NOT_WRITTEN and not self.attempts:
                return f"its batch script could not write to {self.run_labels.output}{self._on_its_host()}"
        if task is not None:
            return task.end
        if self.job is None:
            return ""
        ran = failed or self._attempt(rank).started > 0  # a program, which tells more itself
        shown = (code and not ran and self.end is None) if ended else (self.job.waits or not ran)
        return self._about(self.job) if shown else ""

    def _about(self, job: QueuedJob) -> str:
        """`job 12: PENDING (PartitionConfig): what to do`, or `job 12: FAILED (JobLaunchFailure) on n4`."""
        if job.reason == "JobLaunchFailure":
            return f"{job}{self._on_its_host()}"
        advice = job.advice
        return f"{job}: {advice}" if advice else str(job)

    def _on_its_host(self) -> str:
        """` on n4`, the machine of the batch script; "" if Slurm has forgotten it."""
        host = re.search(r"^host ([A-Za-z0-9._-]{1,100})$", self.over, re.MULTILINE)
        return f" on {host[1]}" if host else ""

    @property
    def phase(self) -> Phase:
        """The phase of the run: Slurm starts and stops its nodes together."""
        if self.job is None:
            return Phase.EXITED if self.submitted or self.attempts or self.end else Phase.CREATED
        if self.job.waits:
            return Phase.RESTARTING if self.attempts else Phase.CREATED
        return Phase.EXITED if self.job.ended else Phase.RUNNING

    def _job_code(self, *, complete: bool) -> int | None:
        """Return the job's exit code, 0 if it was successful, None if unknown. complete: all nodes recorded theirs."""
        if state := self._slurms_end():
            return _TIMEOUT if state in ("TIMEOUT", "DEADLINE") else _KILLED
        if self.end is not None:
            return self.end.code
        known = re.search(r"^exit (\d{1,3}):(\d{1,3})$", self.over, re.MULTILINE)
        code = (128 + int(known[2]) if int(known[2]) else int(known[1])) if known else None
        # Also the exit code if the script could not record that the programs were successful.
        unclear = code == _NOT_WRITTEN and self.attempts
        return None if complete or unclear else code


def parse(text: str, marker: str) -> Iterator[RunInQueue]:
    """Parse the output of ASK. Other lines, and files in an unknown format, are ignored."""
    _, *parts = text.split(f"{marker} ")
    jobs = list(_jobs(parts[0])) if parts else []
    by_id, by_run = {job.id: job for job in jobs}, dict(_by_run(jobs))
    runs: list[dict[str, Any]] = []
    for part in parts[1:]:
        kind, _, rest = part.partition("\n")
        if kind == "spec":
            runs.append({"spec": _spec(rest), "submitted": "", "over": "", "end": None, "attempts": {}})
        elif kind in ("submitted", "over"):
            runs[-1][kind] = rest.strip().partition(";")[0] if kind == "submitted" else rest.strip()
        elif kind == "end":
            found = re.fullmatch(r"(\d{1,3}) (\d{1,12}) ?([A-Z]{0,20})", rest.strip())
            runs[-1]["end"] = ScriptEnd(int(found[1]), float(found[2]), found[3]) if found else None
        elif kind == "attempts":
            runs[-1]["attempts"] = _last_attempts(rest)
    for run in runs:
        if run["spec"]:
            name, sweep = run["spec"]["labels"][labels.RUN], run["spec"]["sweep"]
            job = by_id.get(run["submitted"])
            if job is not None and _is_of_another(job, name, sweep):  # Slurm has used the ID again
                job, run["over"] = None, ""
            yield RunInQueue(job=job or by_run.get(_key(name, sweep)), **run)


def job_without_folder(text: str, marker: str, run: RunId) -> QueuedJob | None:
    """Return a job of the run that has not ended. text: the output of ASK, without a folder of the run."""
    jobs = _jobs(text.partition(f"{marker} ")[2])
    job = dict(_by_run(list(jobs))).get(run)
    return None if job is None or job.ended else job


def options_of(script: str) -> list[str]:
    """Return the options on the #SBATCH lines of a script, as words."""
    lines = script.partition("\n\n")[0].splitlines()
    marked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    return [word for line in marked for word in shlex.split(line, comments=True)]


def _jobs(text: str) -> Iterator[QueuedJob]:
    for line in text.splitlines():
        number, state, reason, command = [*line.split("|", 3), "", "", ""][:4]
        if re.fullmatch(r"[0-9_]{1,24}", number):
            yield QueuedJob(number, state, reason, command)


def _by_run(jobs: Sequence[QueuedJob]) -> Iterator[tuple[str, QueuedJob]]:
    """Yield jobs by _key. What Slurm knows of a job's script takes precedence over the comment."""
    for job in jobs:
        if comment := _OWN_COMMENT.search(job.command):
            yield comment[1], job
    for job in jobs:
        found = _OWN_SCRIPT.match(job.command)
        if found:
            yield (found["run"] if found["script"] == SCRIPT else f"{found['run']}_{job.id.partition('_')[2]}"), job


def _key(run: RunId, sweep: Sequence[RunId]) -> str:
    """Return the run or, for a task of an array, `<last run of the sweep>_<number of the task>`."""
    return f"{sweep[-1]}_{sweep.index(run)}" if run in sweep else run


def _is_of_another(job: QueuedJob, run: RunId, sweep: Sequence[RunId]) -> bool:
    """Return whether the job executes another script, if Slurm knows which."""
    found = _OWN_SCRIPT.match(job.command)
    return job.command.startswith("/") and (found is None or found["run"] not in (run, *sweep[-1:]))


def _spec(text: str) -> Mapping[str, Any]:
    """Parse a run's description; {} if its format is unknown."""
    try:
        found = json.loads(text)
        labels.read(found["labels"])
    except (ValueError, LookupError, TypeError):
        return {}
    as_written = isinstance(found.get("name"), str) and isinstance(found.get("sweep"), list)
    return found if as_written else {}


def _last_attempts(text: str) -> dict[int, LastAttempt]:
    """Return the last attempts by node rank."""
    found: dict[int, LastAttempt] = {}
    pattern = r"^(?:node-(\d{1,5})\.attempts:)(?:start|exit (\d{1,3})) (\d{1,12})$"
    for node, code, moment in re.findall(pattern, text, re.MULTILINE):
        rank = int(node)
        if not code:
            found[rank] = LastAttempt(float(moment))
        elif rank in found:
            found[rank] = LastAttempt(found[rank].started, int(code), float(moment))
    return found
