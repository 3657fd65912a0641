"""A Slurm cluster as an Engine: a run is a job, submitted on the login machine; its files are in the shared folder.

A container is a node of that job. All of them are created, started and stopped together, so a request for one applies
to all; any launcher of the same user finds them by the run's files and the job's ID in them.
"""

from __future__ import annotations

import json
import posixpath
import re
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from launcher.errors import ContainerGone, EngineFailed, EngineUnavailable, NameTaken, NodeUnfit
from launcher.features.slurm.login import LoginMachine, log_in
from launcher.features.slurm.queue import (
    ARRAY,
    ASK,
    COMMENT,
    NODES,
    PLAIN,
    SCRIPT,
    SPEC,
    SUBMITTED,
    QueuedJob,
    RunInQueue,
    job_without_folder,
    options_of,
    parse,
)
from launcher.job.settings import Cluster
from launcher.model.checked import OUTPUT_ROOT
from launcher.model.container import BatchSpec, ContainerSpec, ContainerState, Phase
from launcher.model.facts import NodeFacts
from launcher.model.forward import Forward
from launcher.model.home import user_name
from launcher.model.labels import RUN
from launcher.model.runtime import TRAITS
from launcher.node.connect import LOCAL, Access
from launcher.node.ends import ATTEMPTS, TAIL, Ends, EndsWanted
from launcher.node.engine import Engine
from launcher.node.files import Files, Span
from launcher.node.machine import Done, LocalMachine, Machine, shell
from launcher.node.shared_memory import Shared

_POLL = 1.0  # seconds between two queries of the queue
_LATE = 60.0  # seconds after which NFS shows a new file to other machines (acdirmax)
_LOG = 1 << 20  # bytes of the script's own output
_LOGS, _ATTEMPTS = 4 << 20, 64 << 20  # bytes of the logs and of the attempts of all nodes, for `status`
_LEAST = 256  # bytes of each log
_KILL_TIMEOUT = 60.0  # seconds for Slurm to end a job after SIGKILL
_UNPACK = "tar -xf - --no-same-owner -C /"
KILL_WAIT = r"scontrol show config | sed -n 's/^KillWait *= \([0-9]*\).*/\1/p'"
_TAKEN, _NOT_STORED = 44, 73  # exit codes
_OVERLAP = (20, 11)  # the first Slurm with srun --overlap
# $1: the run's folder. stdin: its description, as one line of JSON, and the script: each may be over 128 KiB, the limit
# for an argument.
_CREATE = f"""
[ ! -e "$1/{NODES}" ] || exit {_TAKEN}
IFS= read -r spec && mkdir -p "$1/{NODES}" "$1/logs" "$1/state" &&
  : >"$1/state/node-0.attempts" && # records who stops the run, also while the job is pending
  cat >"$1/{NODES}/{SCRIPT}" && printf %s "$spec" | cat >"$1/{NODES}/{SPEC}"
"""
# $1: the job. Without --full while its nodes run: srun would get the signal too, and kill them immediately.
_TERMINATE = r"""
scancel --batch --signal=TERM "$1"
squeue -h --steps --jobs="$1" -o %i | grep -q '[.][0-9]' && exec scancel --signal=TERM "$1"
exec scancel --full --signal=TERM "$1"
"""
# $1: a run's folder. Its secrets are in files; Slurm would store the caller's in the job's environment.
_UNSET_SECRETS = f"""
unset_secrets() {{
  for secret in "$1/{NODES}/kit/secrets"/*; do [ ! -f "$secret" ] || unset "${{secret##*/}}"; done
}}
"""
# $1: a job, $2: a run's folder, $3: the ID to store there, by which the run is found. Without it the job is cancelled.
_STORE_ID = f"""
store_id() {{
  file=$2/{NODES}/{SUBMITTED}
  echo "$3" | cat >"$file.part" && mv "$file.part" "$file" && return
  [ -d "$2/{NODES}" ] || echo "the run was removed while it was submitted" >&2
  scancel "$1" || echo "job $1 was not cancelled" >&2
  exit {_NOT_STORED}
}}
"""
# $1: the run's folder, $2: the code, $3: the run, then the options of its script: on the command line they override
# SBATCH_ variables. The job gets the caller's environment, as usual with sbatch.
_SUBMIT = f"""
{PLAIN}{_UNSET_SECRETS}{_STORE_ID}
unset_secrets "$1"
output=$1 code=$2 run=$3; shift 3
id=$(sbatch --comment="{COMMENT} $run" "$@" --parsable --export=ALL --chdir="$code" --output="$output/logs/slurm.log" \\
  "$output/{NODES}/{SCRIPT}" "$run" "$output") || exit
store_id "${{id%%;*}}" "$output" "$id"
"""
# $1: the folder of all runs; $2: how many runs of the sweep may run at the same time, as %N; $3: their number; then the
# runs and the options of their scripts. stdin: the script of the array. Each task executes the script of one run.
_SUBMIT_ARRAY = f"""
{PLAIN}{_UNSET_SECRETS}{_STORE_ID}
root=$1 most=$2 number=$3; shift 3
task=0 runs=''
while [ $task -lt "$number" ]; do
  unset_secrets "$root/$1"
  runs="$runs $1" last=$1 task=$((task + 1)); shift
done
script="$root/$last/{NODES}/{ARRAY}"
cat >"$script.part" && mv "$script.part" "$script" || exit {_NOT_STORED}
id=$(sbatch --comment="{COMMENT} sweep $last" "$@" --parsable --export=ALL --output=/dev/null \\
  --array="0-$((number - 1))$most" "$script") || exit
task=0
for run in $runs; do
  store_id "${{id%%;*}}" "$root/$run" "${{id%%;*}}_$task"
  task=$((task + 1))
done
"""
# $1: the run's folder, $2: the run. Another launcher may be submitting it at the same time.
_REMOVE = rf"""
{PLAIN}
rm -rf -- "$1/{NODES}" || exit
squeue -h -a -u "$(id -u)" -o '%i %o|%k' | while read -r id job; do
  case $job in "$1/{NODES}/{SCRIPT}"[\ \|]* | *"|{COMMENT} $2") scancel "$id" ;; esac
done
"""


def reach(host: str, cluster: Cluster, access: Access) -> Callable[[], Engine]:
    """Log in; return a function that opens the cluster's engine. Raises what log_in raises."""
    if cluster.login == LOCAL:
        machine = LocalMachine(host, user_name(), access.limits)
    else:
        login = log_in(cluster.login, access.ssh_config, access.timeout, ask=access.ask)
        machine = LoginMachine(host, login, access.limits)
    return partial(_opened, SlurmEngine(host, cluster, machine))


def _opened(engine: SlurmEngine) -> Engine:
    engine.open()
    return engine


class SlurmEngine(Engine):
    """A container's ID is its name, `launcher-<run>-<rank>`."""

    def __init__(self, host: str, cluster: Cluster, machine: Machine) -> None:
        super().__init__(host, host, machine)
        self.cluster = cluster
        self.files = Files(machine, home=cluster.workdir)
        self._root = posixpath.join(cluster.workdir, OUTPUT_ROOT)
        self._asking = threading.Lock()
        self._answer: tuple[float, str, dict[str, RunInQueue]] = (0.0, "", {})
        self._incomplete: dict[str, float] = {}  # runs that ended without all exit codes, and when that was first seen

    def open(self) -> None:
        """Raises EngineUnavailable if Slurm does not respond."""
        done = self._slurm("sinfo --version && squeue -h -u root >/dev/null")
        if done.code:
            fix = "run on the login machine: sinfo"
            raise EngineUnavailable(self.node, f"Slurm does not respond: {done.message}", fix)

    def facts(self) -> NodeFacts:
        """Return the facts of the login machine."""
        return replace(self.machine_facts().node, python=self.cluster.python)

    def create(self, spec: ContainerSpec) -> str:
        """spec: the first node's, a BatchSpec. Raises NameTaken."""
        if not isinstance(spec, BatchSpec):
            raise TypeError(f"{spec.name} has no script for the cluster")
        saved = {"name": spec.name, "labels": dict(spec.labels), "code": spec.layout.code, "sweep": spec.sweep}
        saved["options"] = options_of(spec.script)
        texts, taken = f"{json.dumps(saved)}\n{spec.script}".encode(), lambda done: done.code == _TAKEN
        made = self.files.run(_CREATE, spec.output_dir, doing="create the run", accept=taken, stdin=texts)
        if made.code == _TAKEN:
            raise NameTaken(self.node, f"container {spec.name} already exists", "run: launcher status")
        self._forget()
        return spec.name

    def claim(self, name: str, image: str, labels: Mapping[str, str]) -> ContainerState | None:  # noqa: ARG002
        """No lock is needed: Slurm gives each GPU to one job, and the script chooses a free port."""
        return None

    def put(self, container: str, archive: bytes) -> None:
        self.files.run(_UNPACK, doing=f"unpack the scripts of {container}", stdin=archive, timeout=600)

    def start(self, container: str) -> None:
        """Submit the job; the last run of a sweep submits all of them. Raises EngineFailed with sbatch's reason."""
        run = self._get(container)
        known, sweep = run.run_labels, run.spec["sweep"]
        if run.submitted or (sweep and sweep[-1] != known.run):
            return
        options = run.spec["options"]
        if sweep:
            most = f"%{self.cluster.at_once}" if self.cluster.at_once else ""
            script = _array_script(self._root, sweep, posixpath.relpath(run.spec["code"], known.output))
            done = self._slurm(_SUBMIT_ARRAY, self._root, most, str(len(sweep)), *sweep, *options, stdin=script)
        else:
            done = self._slurm(_SUBMIT, known.output, run.spec["code"], known.run, *options)
        if done.code == _NOT_STORED:
            fix = f"check the free space and the owner of {self._root}"
            raise EngineFailed(self.node, f"could not store the job's ID, and cancelled the job: {done.message}", fix)
        if done.code:
            fix = "correct the job's gpus, resources or cluster, or the cluster in your settings file"
            raise EngineFailed(self.node, f"sbatch rejected the job: {done.message}", fix)
        self._forget()

    def list(self, labels: Mapping[str, str | None]) -> Sequence[ContainerState]:
        runs = self._runs(labels.get(RUN))
        states = [state for run in runs.values() for state in run.states()]
        return [s for s in states if all(k in s.labels and v in (None, s.labels[k]) for k, v in labels.items())]

    def to_stop(self, states: Sequence[ContainerState]) -> Sequence[ContainerState]:
        """Return the first node of each run."""
        first: dict[str, ContainerState] = {}
        for state in states:
            first.setdefault(state.labels[RUN], state)
        return [*first.values()]

    def wait(self, container: str, timeout: float) -> ContainerState:
        """A run that has ended counts as running until its exit codes can be read, at most for _LATE."""
        until = time.monotonic() + timeout
        while True:
            state = self._state(container)
            if state.phase.ended and state.exit_code is None:
                first = self._incomplete.setdefault(state.labels[RUN], time.monotonic())
                late = time.monotonic() - first < _LATE
                state = replace(state, phase=Phase.RUNNING) if late else state
            left = until - time.monotonic()
            if state.phase.ended or left <= 0:
                return state
            time.sleep(min(_POLL, left))

    def stop(self, container: str, grace: float) -> ContainerState:
        """Send SIGTERM to all nodes and to the script, which then requests no restart."""
        self._forget()  # a job that was pending a second ago may run now, and must get its time for a checkpoint
        run = self._get(container)
        if run.job is not None and not run.job.ended:
            if run.phase is Phase.RUNNING and grace:
                self._slurm(_TERMINATE, run.job.id)
                self._forget()
                if self.wait(container, grace).phase.ended:
                    return self._state(container)
            self._cancel(run.job)
            if not self.wait(container, self._kill_wait() + _KILL_TIMEOUT).phase.ended:
                what = f"could not stop {run.job}"
                raise EngineFailed(self.node, what, f"run on the login machine: scontrol show job {run.job.id}")
        return self._state(container)

    def signal(self, container: str, name: str) -> None:
        job = self._get(container).job
        if job is not None and not job.ended:
            self._cancel(job, f"--signal={name}")

    def remove(self, container: str) -> None:
        """Remove the run's scripts and secrets, not its output. A pending job is cancelled first."""
        try:
            run = self._get(container)
        except ContainerGone:
            return
        if run.phase is Phase.RUNNING:
            raise EngineFailed(self.node, f"{container} is still running", "stop it first: launcher down")
        self.stop(container, 0)
        doing = f"remove the scripts of {container}"
        self.files.run(_REMOVE, run.run_labels.output, run.run_labels.run, doing=doing, timeout=600)
        self._forget()

    def logs(self, container: str, tail: int = 200) -> bytes:
        """Return the output of the script itself."""
        output = self._get(container).run_labels.output
        path = posixpath.join(output, "logs", "slurm.log")
        try:
            return self.files.read(path, self.files.before_last_lines(path, tail, _LOG, below=output), below=output)
        except (FileNotFoundError, NodeUnfit):
            return b""

    def interact(self, container: str, argv: Sequence[str], *, terminal: bool, ports: Sequence[Forward] = ()) -> int:
        """Run a further step of the job, on that node. Raises EngineFailed if the job is not running."""
        if ports:
            fix = "find the node's name with squeue, then run: ssh -L PORT:NODE:PORT LOGIN-MACHINE"
            raise NodeUnfit(self.node, "ports of a cluster's nodes cannot be forwarded through Slurm", fix)
        run, rank = self._get(container), container.rpartition("-")[2]
        if run.job is None or run.phase is not Phase.RUNNING:
            raise EngineFailed(self.node, f"{container} is not running", "run: launcher status")
        known = run.run_labels
        if TRAITS[known.runtime].isolates:
            what, fix = "cannot run a command in a container on a cluster", f"use: srun --jobid={run.job.id}"
            raise NodeUnfit(self.node, what, fix)
        asked = self._slurm('squeue -h -o %A -j "$1"; srun --version', run.job.id).out.decode(errors="replace")
        number, _, version = asked.partition("\n")  # not 12_3
        if (release := re.search(r"(\d+)\.(\d+)", version)) and (int(release[1]), int(release[2])) < _OVERLAP:
            what = f"{version.strip()} cannot run a command beside a job's program: srun --overlap needs 20.11 or newer"
            raise NodeUnfit(self.node, what, f"if the site allows it, log in to the machine: squeue -j {number} -o %N")
        step = ["srun", f"--jobid={number}", "--overlap", "--mpi=none", "--nodes=1", "--ntasks=1"]
        step += [f"--relative={rank}", *(["--pty"] if terminal else [])]
        variables = [f"LAUNCHER_NODE_RANK={rank}", f"LAUNCHER_OUTPUT={known.output}", f"LAUNCHER_RUN={known.run}"]
        step += ["env", *variables, "sh", f"{known.output}/state/node.sh", *argv]
        command = shell(f'{PLAIN}exec "$@"', *step)
        return self.machine.interact(command, terminal=terminal, interrupt=lambda: None)

    def guard(self, container: str) -> AbstractContextManager[object]:  # noqa: ARG002 - not supported
        raise NodeUnfit(self.node, "clusters have no temporary containers", "use launcher exec in a run")

    def ends(self, output: str, wanted: Mapping[str, EndsWanted]) -> Mapping[str, Ends]:
        """One request for all nodes, whose files are in one folder; each may be a part of a few MiB of all.

        The machines are not asked: only what Slurm starts runs there.
        """
        tail, most = max(_LEAST, min(TAIL, _LOGS // len(wanted))), min(ATTEMPTS, _ATTEMPTS // len(wanted))
        spans = {node: _spans(files, tail, most) for node, files in wanted.items()}
        pieces: dict[Span, bytes] = {}
        for span, piece in self.files.read_spans([*{s: 0 for own in spans.values() for s in own}], below=output):
            pieces[span] = pieces.get(span, b"") + piece
        return {node: Ends(*(pieces.get(span, b"") for span in own)) for node, own in spans.items()}

    def clear_shared_memory(self, since: float) -> Sequence[str]:  # noqa: ARG002 - the login machine runs no jobs
        return ()

    def shared_memory(self, since: float) -> Sequence[Shared]:  # noqa: ARG002 - the same
        return ()

    def _cancel(self, job: QueuedJob, *options: str) -> None:
        """Cancel a job. If it has ended already this is no error; the next query shows it."""
        self._slurm('scancel "$@"', *options, job.id)
        self._forget()

    def _slurm(self, script: str, *arguments: str, stdin: str = "") -> Done:
        """Run a script that calls Slurm's commands."""
        return self.machine.script(PLAIN + script, *arguments, stdin=stdin.encode())

    def _kill_wait(self) -> float:
        found = self._slurm(KILL_WAIT).out.strip()
        return float(found) if found.isdigit() else 30.0

    def _state(self, container: str) -> ContainerState:
        return self._get(container).states()[int(container.rpartition("-")[2])]

    def _get(self, container: str) -> RunInQueue:
        name = container.removeprefix("launcher-").rpartition("-")[0]
        found = self._runs(name).get(name)
        if found is None:
            fix = f"check the run's folder in {self._root}"
            raise ContainerGone(self.node, f"container {container} no longer exists", fix)
        return found

    def _runs(self, run: str | None) -> dict[str, RunInQueue]:
        """Return the runs by ID. All threads that wait for nodes of a run share a result, for at most _POLL."""
        with self._asking:
            when, wanted, known = self._answer
            if wanted == (run or "*") and time.monotonic() - when < _POLL:
                return known
            marker = secrets.token_hex(16)
            done = self.machine.script(ASK, marker, self._root, run or "*")
            if done.code:
                raise EngineUnavailable(self.node, f"squeue failed: {done.message}", "run on the login machine: squeue")
            answer = done.out.decode("utf-8", "replace")
            found = {one.run_labels.run: one for one in parse(answer, marker)}
            if run and run not in found and (job := job_without_folder(answer, marker, run)):
                what, fix = f"{job} is the run {run}, whose folder was removed", f"end it: scancel {job.id}"
                raise EngineFailed(self.node, what, fix)
            self._answer = (time.monotonic(), run or "*", found)
            return found

    def _forget(self) -> None:
        with self._asking:
            self._answer = (0.0, "", {})


def _spans(files: EndsWanted, tail: int, attempts: int) -> tuple[Span, ...]:
    """Return what is read of a node, in the order of Ends. tail, attempts: bytes of its log, and of that file."""
    metrics = (Span(files.metrics, -TAIL, TAIL),) if files.metrics else ()
    return (Span(files.log, -tail, tail), Span(files.attempts, -attempts, attempts), *metrics)


def _array_script(root: str, runs: Sequence[str], code: str) -> str:
    """Return the script of a job array, which executes in each task the script of one run. code: in a run's folder."""
    return f"""#!/bin/bash
root={shlex.quote(root)}
runs=({" ".join(runs)})
run=${{runs[SLURM_ARRAY_TASK_ID]}}
cd "$root/$run/{code}" || exit {_NOT_STORED}
exec bash "$root/$run/{NODES}/{SCRIPT}" "$run" "$root/$run" >>"$root/$run/logs/slurm.log" 2>&1
"""
