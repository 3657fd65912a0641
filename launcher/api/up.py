"""Start runs on the machines of a job, or on a cluster."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path

from launcher.api.jobs import JobLike, chosen_config, load
from launcher.api.run import Run
from launcher.errors import InUse, LauncherError, NodesFailed, StoppedByUser, UsageError
from launcher.image.lock import lock_path
from launcher.job.dump import dump_job
from launcher.job.files import check_files, read_secrets
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep, variant_name
from launcher.job.settings import read_settings
from launcher.model.host import cluster_host
from launcher.model.plan import Membership, Plan, RunId, is_run_id, new_run_id
from launcher.model.progress import Log, OnProgress, no_progress
from launcher.node import output_folder
from launcher.node.connect import Fleet, connect
from launcher.node.parallel import Future, in_background
from launcher.records.groups import GROUPED
from launcher.records.paths import RUNS, RunPaths
from launcher.records.snapshot import Snapshot, list_code, pack
from launcher.records.store import Record, find
from launcher.records.trainer import check_options
from launcher.run.cluster import kind_of
from launcher.run.earlier import files_of
from launcher.run.gpus import Waiting, counts, wait_for_gpus
from launcher.run.locate import attach
from launcher.run.prepare import make_plan, prepare
from launcher.run.start import start
from launcher.run.state import RunState
from launcher.run.stop import stop

STALE = 10.0  # seconds after which GPUs are checked again: others may have taken them during an image pull


@dataclass(frozen=True)
class StartOptions:
    """Options of a start. log: called with each message; progress: as for `up`."""

    resume: RunId | None = None  # an earlier run, from whose checkpoints it starts
    fresh_without: bool = False  # if that run has no checkpoint, start without one
    wait: bool = False  # while GPUs or the port are in use
    log: Log = print
    progress: OnProgress = no_progress
    ssh_config: Path | None = None
    started: threading.Event = field(default_factory=threading.Event)  # set when every container is running
    here: Path = field(default_factory=Path.cwd)  # a program may change to another folder, as during a sweep
    tries_again: bool = False  # the caller retries if a GPU or port is in use: such an attempt leaves no record


@contextmanager
def until_started(started: threading.Event | None = None) -> Iterator[None]:
    """Make Ctrl-C report whether anything was started. started: set when every container is running."""
    try:
        yield
    except KeyboardInterrupt as stop:
        nothing = "nothing was started, and nothing remains on the nodes"
        if isinstance(stop.__cause__, LauncherError):  # it failed as well, or something remains there
            nothing = str(stop.__cause__)
        raise KeyboardInterrupt(
            "to see the run: launcher status" if started and started.is_set() else nothing
        ) from None


def up(
    job: JobLike,
    *,
    on: str | None = None,
    resume: str | None = None,
    wait: bool = False,
    log: Log = print,
    progress: OnProgress = no_progress,
    group: Membership | None = None,
    ssh_config: str | PathLike[str] | None = None,
) -> Run:
    """Start a run of this job. Return when every container is running, or when a cluster has accepted the job.

    on: a cluster of the settings file, used instead of the job's nodes. resume: an earlier run (ID, prefix or job
    name), from whose latest checkpoint it starts. wait: wait while GPUs or the port are in use. log: called with each
    line of text. progress: called with (node, bytes sent, total bytes) while an image is sent. group: the sweep to
    which the run belongs. May be called from several threads. Raises the errors of launcher.errors; on any error, and
    on Ctrl-C, nothing of the run remains on the nodes.
    """
    options = StartOptions(_earlier(resume), False, wait, log, progress, chosen_config(ssh_config))
    with until_started(options.started):
        loaded = _without_sweep(load(job))
        if on is not None:
            return _submit([(loaded, group)], on, options)[0]
        return start_run(loaded, inputs_of(loaded, log), group, options)


def start_run(job: Job, inputs: Inputs, group: Membership | None, options: StartOptions) -> Run:
    """Start a run of a job on its machines: connect, gather facts, prepare image and plan, record, start."""
    with ExitStack() as on_error:
        waiting = Waiting(options.log, wait=options.wait)
        fleet = on_error.enter_context(connect(job.hosts(), job.runtime, options.ssh_config, ping=False))
        facts, checked_at = wait_for_gpus(job, fleet, waiting), time.monotonic()
        code = inputs.packed(options.log)
        lock = options.here / lock_path(job.file) if job.file else None
        prepared = prepare(job, fleet, facts, options.log, options.progress, lock, here=options.here)
        if counts(job) and time.monotonic() - checked_at > STALE:
            prepared = prepared.at(wait_for_gpus(job, fleet, waiting))
        plan = make_plan(job, prepared, code.digest)
        record = Record.of(plan, list(inputs.secrets.values()), options.here / RUNS)
        _start(job, plan, record, fleet, inputs, group, options, waiting)
        options.started.set()
        on_error.pop_all()
        return Run(record, options.ssh_config, options.log, attach(record, fleet), plan)


def _without_sweep(job: Job) -> Job:
    if job.sweep:
        what = f"is a sweep of {len(job.sweep)} variants, but launcher.up starts a single run"
        fix = "call launcher.up(variant) for each variant of launcher.api.up.variants(job)"
        raise UsageError(f"job {job.name}", what, fix)
    return job


def variants(job: JobLike) -> list[tuple[Job, Membership | None]]:
    """Return the jobs of a sweep, each with its membership in one new group. Without a sweep: the job, with None."""
    loaded = load(job)
    group = new_run_id(loaded.name)
    members: list[Membership | None] = [Membership(group, variant_name(variant)) for variant in loaded.sweep]
    return list(zip(expand_sweep(loaded), members or [None], strict=True))


def up_array(
    job: JobLike, on: str, *, resume: str | None = None, log: Log = print, ssh_config: str | PathLike[str] | None = None
) -> list[Run]:
    """Submit the variants of a sweep to a cluster as one job array: all of them, or none if an error is raised."""
    options = StartOptions(_earlier(resume), log=log, ssh_config=chosen_config(ssh_config))
    with until_started(options.started):
        return _submit(variants(job), on, options)


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run from the caller's machine. code: packed while the nodes connect; `code()` waits for it."""

    secrets: Mapping[str, str] = field(repr=False)
    code: Future[Snapshot]
    messages: Sequence[str]  # of packing: not printed by its thread, as nobody waits for it if connecting fails

    def packed(self, log: Log) -> Snapshot:
        """Wait for the code and report what is sent and what is left out."""
        code = self.code()
        for message in self.messages:
            log(message)
        return code


def inputs_of(job: Job, log: Log, *, bare: bool = False) -> Inputs:
    """Read the inputs of a run. bare: as for `list_code`.

    Raises JobInvalid like `list_code`, and if a file of the job is missing.
    """
    here = Path.cwd()
    check_files(job, here, os.environ)
    listing = list_code(job, here, log, bare=bare)
    check_options(job, listing.folder, listing.trainer, log)
    secrets, messages = read_secrets(job, here, os.environ), list[str]()
    return Inputs(secrets, in_background(partial(pack, listing, messages.append, slow=log)), messages)


def _earlier(resume: str | None) -> RunId | None:
    """Return the ID of the run to resume; a complete ID needs no local record. Raises RunUnknown."""
    return resume if resume is None or is_run_id(resume) else find(resume).run


def _write(
    record: Record, plan: Plan, job: Job, code: Snapshot, group: Membership | None, resume: RunId | None
) -> None:
    """Write runs/<run id>/ with everything that is known before the start."""
    record.write(plan, dump_job(job), code.archive)
    record.write_left_out(code.folder, code.left_out)
    if group is not None:
        record.event(GROUPED, group=group.group, variant=group.variant)
    if job.file is not None and _is_unchanged(job, job.file):
        record.event("job", file=str(job.file))
    if resume is not None:
        record.event("resumes", earlier=resume)


def _is_unchanged(job: Job, file: Path) -> bool:
    """Whether the file alone gives this job, without --set, --nodes or a sweep."""
    try:
        return load(file) == job
    except LauncherError:
        return False


def _start(
    job: Job,
    plan: Plan,
    record: Record,
    fleet: Fleet,
    inputs: Inputs,
    group: Membership | None,
    options: StartOptions,
    waiting: Waiting,
) -> None:
    """Record the run and start it, once its GPUs are free if it may wait. On failure, the reason is recorded."""
    for warning in plan.warnings:
        options.log(f"warning: {warning}")
    code = inputs.code().archive
    try:
        _write(record, plan, job, inputs.code(), group, options.resume)
        with ExitStack() as held:
            fill = None
            if options.resume is not None:
                required = not options.fresh_without
                old = Record(RunPaths(options.here / RUNS / options.resume))
                earlier = partial(files_of, old, plan, fleet, code, options.ssh_config, options.log)
                fill = held.enter_context(earlier(required=required))
            while True:
                try:
                    return start(plan, fleet, code, inputs.secrets, record.event, fill)
                except NodesFailed as error:
                    waiting.after(error)
    except LauncherError as error:
        if options.tries_again and isinstance(error, NodesFailed) and all(isinstance(e, InUse) for e in error.errors):
            record.remove()
        else:
            record.finish({"state": "failed", "exit_code": error.exit_code, "why": str(error)})
        raise
    except KeyboardInterrupt:
        if record.paths.plan.exists():
            why = "Ctrl-C before it started"
            record.finish({"state": "stopped", "exit_code": StoppedByUser.exit_code, "why": why})
        else:
            record.remove()
        raise


def _submit(jobs: Sequence[tuple[Job, Membership | None]], on: str, options: StartOptions) -> list[Run]:
    """Submit jobs, several of them as one job array, which the last start submits. The runs share a connection."""
    ids = tuple(new_run_id(job.name) for job, _ in jobs)
    array, made, plans = ids if len(ids) > 1 else (), list[Record](), list[Plan]()
    cluster, host = read_settings(os.environ).cluster(on), cluster_host(on)
    kind = kind_of(cluster)
    with ExitStack() as on_error:
        # ssh may ask for a password: before anything is printed, such as what is sent as code
        fleet = on_error.enter_context(connect([(host, host)], None, options.ssh_config, ping=False))
        inputs = inputs_of(jobs[0][0], options.log, bare=cluster.container == "none")  # variants differ only in `args`
        code = inputs.packed(options.log)
        try:
            for (job, group), run in zip(jobs, ids, strict=True):
                plan = kind.plan(job, cluster, fleet.engines[0], code.digest, run, array)
                plans.append(plan)
                made.append(Record.of(plan, list(inputs.secrets.values()), options.here / RUNS))
                _start(job, plan, made[-1], fleet, inputs, group, options, Waiting(options.log, wait=False))
        except BaseException as error:
            _undo(made, fleet, error)
            raise
        options.started.set()
        on_error.pop_all()
    runs = zip(made, plans, strict=True)  # share the connection: a new one might ask for a password again
    return [Run(record, options.ssh_config, options.log, attach(record, fleet), plan) for record, plan in runs]


def _undo(made: Sequence[Record], fleet: Fleet, cause: BaseException) -> None:
    """Remove the variants of an array that were created before its submission failed."""
    code = cause.exit_code if isinstance(cause, LauncherError) else StoppedByUser.exit_code
    for record in made[:-1]:  # the start of the last one has cleaned up
        stop(fleet.engines, record.run, code=None)  # the whole output folder is removed
        master = attach(record, fleet).nodes[0]
        output_folder.remove(fleet.engines[0].files, master.output, record.run)
        record.event("undone", reason=str(cause) or type(cause).__name__)
        record.finish({"state": RunState.FAILED, "exit_code": code, "why": str(cause)})
