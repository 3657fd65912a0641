"""Start runs on the machines of a job, or on a cluster."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path

from launcher.api.inputs import Inputs, inputs_of
from launcher.api.jobs import JobLike, load
from launcher.api.run import Run
from launcher.api.until_started import until_started
from launcher.errors import LauncherError, NodesFailed, OutputKept, StoppedByUser, UsageError
from launcher.extras import warn_on_error
from launcher.image.lock import lock_path
from launcher.job.arguments import merged
from launcher.job.dump import dump_job
from launcher.job.files import hidden
from launcher.job.models import Job
from launcher.model.plan import Membership, Plan, RunId, is_run_id, new_run_id
from launcher.model.progress import Log, OnProgress, no_progress, silent
from launcher.node.connect import Fleet
from launcher.node.parallel import in_background
from launcher.node.ssh.config import chosen_config
from launcher.planning.build import Prepared
from launcher.planning.containers import in_group
from launcher.records import sweeps
from launcher.records.collect import collect, output_folders
from launcher.records.paths import RunPaths
from launcher.records.revisions import resolved
from launcher.records.store import Record, find, without_nodes
from launcher.records.trainer import TRAINER
from launcher.run.begin.earlier import Earlier, files_of
from launcher.run.begin.gpus import Waiting, in_use, wait_for_gpus, wants_a_number, warn_without_gpus
from launcher.run.begin.prepare import make_plan, prepare
from launcher.run.begin.start import start_containers
from launcher.run.cluster import Destination, kind_of, on_cluster, own_machines
from launcher.run.locate import connected_run
from launcher.run.tidy import remove_done

STALE = 10.0  # seconds after which GPUs are checked again: others may have taken them during an image pull


@dataclass(frozen=True)
class StartOptions:
    """Options of a start. log: called with each message; progress: as for `up`."""

    resume: Earlier | None = None
    wait: bool = False  # while GPUs or the port are in use
    log: Log = print
    progress: OnProgress = no_progress
    ssh_config: Path | None = None
    started: threading.Event = field(default_factory=threading.Event)  # set when every container is running
    run: RunId | None = None  # its ID; None: a new one


def up(
    job: JobLike,
    *,
    on: str | None = None,
    resume: str | None = None,
    wait: bool = False,
    log: Log | None = print,
    progress: OnProgress | None = None,
    group: Membership | None = None,
    ssh_config: str | PathLike[str] | None = None,
) -> Run:
    """Start a run of this job. Return when every container is running, or when a cluster has accepted the job.

    on: a cluster of the settings file, used instead of the job's nodes. resume: an earlier run (ID, prefix or job
    name), from whose latest checkpoint it starts; or the URL of the trainer's --mirror. wait: wait while GPUs or the
    port are in use. log: called with each line of text; None: silent. progress: called with (node, bytes sent, total
    bytes) while an image is sent. group: the sweep to which the run belongs. May be called from several threads. Raises
    the errors of launcher.errors; on any error, and on Ctrl-C, nothing of the run remains on the nodes.
    """
    log = log or silent
    with until_started():
        loaded, earlier = from_store(_without_sweep(load(job)), resume)
        loaded = resolved(loaded, Path.cwd())
    options = StartOptions(run_to_resume(earlier), wait, log, progress or no_progress, chosen_config(ssh_config))
    with until_started(options.started):
        destination = own_machines(loaded) if on is None else on_cluster(on)
        return start_run(loaded, destination, inputs_of(loaded, destination, log), group, options)


def start_run(
    job: Job, destination: Destination, inputs: Inputs, group: Membership | None, options: StartOptions
) -> Run:
    """Start a run of a job: connect, make its plan, record it, start it."""
    with ExitStack() as on_error:
        fleet = on_error.enter_context(destination.connect(options.ssh_config))
        run = start_on(fleet, job, destination, inputs, group, options)
        on_error.pop_all()
        return run


def start_on(
    fleet: Fleet, job: Job, destination: Destination, inputs: Inputs, group: Membership | None, options: StartOptions
) -> Run:
    """The same on connected nodes, which the caller closes if an error is raised."""
    new = _NewRun(fleet, job, inputs, group, options)
    waiting = Waiting(options.log, wait=options.wait, runs=inputs.runs)
    with new.tidied():
        prepared = new.prepared(waiting) if destination.cluster is None else None
        plan = new.plan_on(destination) if prepared is None else new.plan(prepared)
        for warning in plan.warnings:
            options.log(f"warning: {warning}")
        record = Record.of(plan, hidden(inputs.secrets, job.env), inputs.runs)
        with _failure_recorded(record, fleet, options.log):
            new.write(record, plan)
            with new.earlier_files(plan) as fill:
                plan = new.begin(plan, prepared, record, waiting, fill)
    return Run(record, options.ssh_config, options.log, connected_run(record, fleet), plan)


@dataclass(frozen=True)
class _NewRun:
    """A run that is being started: what it is made from, and its steps, in order."""

    fleet: Fleet
    job: Job
    inputs: Inputs
    group: Membership | None
    options: StartOptions

    @contextmanager
    def tidied(self) -> Iterator[None]:
        """Meanwhile, remove the containers of the job's earlier runs that are done, but of the newest one."""
        said = list[str]()
        tidying = in_background(partial(self._tidy, said.append))
        try:
            yield
        finally:
            tidying()  # wait for it
        for text in said:
            self.options.log(text)

    def _tidy(self, say: Log) -> None:
        if self.group is None:  # a sweep has parallel variants
            but = None if self.options.resume is None else self.options.resume.run
            removing = partial(remove_done, self.job.name, self.fleet, self.inputs.runs, but, say)
            warn_on_error("warning: containers of earlier runs were not removed", removing, None, say)

    def prepared(self, waiting: Waiting) -> Prepared:
        """On the job's machines: gather facts, choose GPUs and a port, prepare image, data and addresses."""
        job, fleet, options = self.job, self.fleet, self.options
        allotment, checked_at = wait_for_gpus(job, fleet, waiting), time.monotonic()
        warn_without_gpus(job, allotment, options.log)
        self.inputs.packed(options.log)
        lock_file = self.inputs.here / lock_path(job.file) if job.file else None
        found = prepare(job, fleet, allotment, options.log, options.progress, lock_file, here=self.inputs.here)
        if wants_a_number(job) and time.monotonic() - checked_at > STALE:
            found = found.at(wait_for_gpus(job, fleet, waiting))
        return found

    def plan(self, prepared: Prepared, run: RunId | None = None) -> Plan:
        """run: its ID; None: that of the options."""
        watched = self.group is None and os.environ.get("CI", "").lower() not in ("1", "true")
        digest = self.inputs.code().digest
        plan = make_plan(self.job, prepared, digest, run or self.options.run, watched=watched)
        return plan if self.group is None else in_group(plan, self.group)

    def plan_on(self, destination: Destination) -> Plan:
        """On a cluster, which chooses the machines: the plan that its kind makes of the job."""
        assert destination.cluster is not None
        code, run = self.inputs.packed(self.options.log), self.options.run or new_run_id(self.job.name)
        engine, kind = self.fleet.engines[0], kind_of(destination.cluster)
        plan = kind.plan(self.job, destination.cluster, engine, code.digest, run, destination.together)
        return plan if self.group is None else in_group(plan, self.group)

    def write(self, record: Record, plan: Plan) -> None:
        """Write runs/<run id>/ with everything that is known before the start."""
        code = self.inputs.code()
        try:
            record.write(plan, dump_job(self.job), code.archive, self.group)
            if self.group is not None:
                sweeps.keep(self.group, record.mask, self.inputs.runs)
            record.write_left_out(code.folder, code.left_out)
        except OSError:  # with a plan and without a result it would be the latest run
            record.remove()
            raise
        if code.revision is not None:
            record.of_revision(code.revision)
        if self.job.is_of_file:
            record.event("job", file=str(self.job.file))
        if self.options.resume is not None:
            record.event("resumes", earlier=self.options.resume.run)

    def earlier_files(self, plan: Plan) -> AbstractContextManager[Callable[[], None] | None]:
        """Find the files from which the run resumes. The context gives what copies them; None if it resumes nothing."""
        resume, options = self.options.resume, self.options
        if resume is None:
            return nullcontext()
        group = self.group  # whose variants start beside each other

        def log(text: str) -> None:
            options.log(text if group is None else f"{group.shown}: {text}")

        old, code = Record(RunPaths(self.inputs.runs / resume.run)), self.inputs.code().archive
        return files_of(old, plan, self.fleet, code, options.ssh_config, log, required=resume.required)

    def begin(
        self,
        plan: Plan,
        prepared: Prepared | None,
        record: Record,
        waiting: Waiting,
        fill: Callable[[], None] | None,
    ) -> Plan:
        """Start all containers: on other GPUs or another port if another run has taken the plan's, and again after a
        wait if it may wait. Return the plan that was started. prepared: what the plan was made from; None on a cluster.
        """
        archive, secrets = self.inputs.code().archive, self.inputs.secrets
        while True:
            try:
                start_containers(plan, self.fleet, archive, secrets, record.event, fill)
            except NodesFailed as error:
                if prepared is None:
                    raise
                lost, who = error, in_use(error)
            else:
                self.options.started.set()
                return plan
            now = prepared.at(wait_for_gpus(self.job, self.fleet, waiting))
            if now.allotment.exclusive == prepared.allotment.exclusive:  # the job names them, or they are free again
                waiting.after(lost)
            else:
                waiting.log(f"{who}: the run is planned again")
            prepared, plan = now, self.plan(now, plan.run)  # also for its time: old locks count as abandoned
            record.write_plan(plan)


def _collect_kept(record: Record, fleet: Fleet, kept: Sequence[OutputKept]) -> None:
    """Collect the output folders that are kept. What could not be read stays there: the error has the next step."""
    engines = {engine.node: engine for engine in fleet.engines if any(each.is_of(engine.node) for each in kept)}
    folders = output_folders(engines, [node for node in record.nodes() if node.name in engines])
    collect(folders, record.paths.root, mask=record.mask, code=record.sent_code)


@contextmanager
def _failure_recorded(record: Record, fleet: Fleet, log: Log) -> Iterator[None]:
    """Record why the run was not started, and what programs have printed that had begun."""
    try:
        yield
    except LauncherError as error:
        record.finish({"state": "failed", "exit_code": error.exit_code, "why": str(error)})
        errors = error.errors if isinstance(error, NodesFailed) else (error,)
        if kept := [each for each in errors if isinstance(each, OutputKept)]:
            printed = partial(_collect_kept, record, fleet, kept)
            warn_on_error("warning: what the program has printed was not downloaded", printed, None, log)
        raise
    except KeyboardInterrupt:
        if record.started:
            raise
        if record.paths.plan.exists():
            why = "Ctrl-C before it started"
            record.finish({"state": "stopped", "exit_code": StoppedByUser.exit_code, "why": why})
        else:
            record.remove()
        raise


def _without_sweep(job: Job) -> Job:
    if job.sweep:
        what = f"is a sweep of {len(job.sweep)} variants, but launcher.up starts a single run"
        fix = "run all: launcher up JOB; or start one: launcher.load(JOB, set={'sweep': None, 'run.args.KEY': VALUE})"
        raise UsageError(f"job {job.name}", what, fix)
    return job


def from_store(job: Job, resume: str | None) -> tuple[Job, str | None]:
    """If `resume` is a URL, return the job with it as the trainer's --resume, and None; else return both unchanged.

    Raises UsageError if the job does not run the trainer, or is a sweep.
    """
    if resume is None or "://" not in resume:
        return job, resume
    if job.sweep:
        what = "is a URL, but the job is a sweep, whose variants each have their own checkpoints"
        raise UsageError("--resume", what, "to resume it: --resume GROUP")
    if job.run.module != TRAINER:
        what = f"is a URL, which only the launcher's trainer reads (run.module: {TRAINER})"
        raise UsageError("--resume", what, "give it to your program: --set run.args.KEY=URL")
    args = merged(job.run.args, {"resume": resume} if isinstance(job.run.args, Mapping) else ("--resume", resume))
    return job.model_copy(update={"run": job.run.model_copy(update={"args": args})}), None


def run_to_resume(text: str | None) -> Earlier | None:
    """Return the run to resume; a complete ID needs no local record. Raises RunUnknown."""
    if text is None:
        return None
    if is_run_id(text):
        return Earlier(text)
    with without_nodes("call `up` in the folder where it was started, or give its whole ID: launcher runs --nodes a,b"):
        return Earlier(find(text).run)
