"""Starting runs: on machines of the job's own, or on a cluster."""

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
from launcher.image.lock import path_beside
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
from launcher.records.snapshot import Snapshot, pack
from launcher.records.store import Record, find
from launcher.run.cluster import plan_on
from launcher.run.earlier import checkpoints_of
from launcher.run.gpus import Waiting, counts, settle
from launcher.run.locate import attach
from launcher.run.prepare import prepare
from launcher.run.start import start
from launcher.run.state import RunState
from launcher.run.stop import stop

STALE = 10.0  # seconds in which others may have taken GPUs that were idle, while an image was pulled


@dataclass(frozen=True)
class How:
    """What the caller chose about a start. log: called with each line for a person; progress: as for `up`."""

    resume: RunId | None = None  # an earlier run, whose checkpoints it begins with
    fresh_without: bool = False  # if that has left no checkpoint, begin without
    wait: bool = False  # for GPUs that others use
    log: Log = print
    progress: OnProgress = no_progress
    ssh_config: Path | None = None
    started: threading.Event = field(default_factory=threading.Event)  # every container runs
    tries_again: bool = False  # the caller, where something is in use: such a try leaves no record


@contextmanager
def until_started(started: threading.Event | None = None) -> Iterator[None]:
    """A Ctrl-C says whether anything was started: `started` is set when every container runs."""
    try:
        yield
    except KeyboardInterrupt:
        nothing = "nothing was started, and nothing is left on the nodes"
        raise KeyboardInterrupt("see launcher status" if started and started.is_set() else nothing) from None


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
    """Start a run of this job; returns when every container runs, or a cluster has accepted it.

    on: a cluster of the settings file, instead of the job's nodes. resume: an earlier run (id, prefix or job name)
    whose newest checkpoint it begins with. wait: for GPUs that others use. log: called with each line of text.
    progress: called with (node, bytes sent, bytes in all) while an image is sent. group: the sweep that the run belongs
    to. May be called in several threads at once. Raises the errors of launcher.errors; whatever goes wrong, and on
    Ctrl-C, nothing of the run is left on any node.
    """
    how = How(_earlier(resume), False, wait, log, progress, chosen_config(ssh_config))
    with until_started(how.started):
        loaded = _without_sweep(load(job))
        if on is not None:
            return _submit([(loaded, group)], on, how)[0]
        return start_run(loaded, inputs_of(loaded, log), group, how)


def start_run(job: Job, inputs: Inputs, group: Membership | None, how: How) -> Run:
    """Start a run of a job on its own machines: connect, facts, image and plan, record, start."""
    with ExitStack() as on_error:
        waiting = Waiting(how.log, wait=how.wait)
        fleet = on_error.enter_context(connect(job.hosts(), job.runtime, how.ssh_config, ping=False))
        facts, looked = settle(job, fleet, waiting), time.monotonic()
        code = inputs.code()
        lock = path_beside(job.file) if job.file else None
        plan = prepare(job, fleet, facts, code.digest, how.log, how.progress, lock)
        if counts(job) and time.monotonic() - looked > STALE:
            facts = settle(job, fleet, waiting)
            plan = prepare(job, fleet, facts, code.digest, how.log, how.progress, lock)
        record = _record(job, plan, inputs, group, how)
        _start(plan, record, fleet, inputs, how, waiting)
        how.started.set()
        on_error.pop_all()
        return Run(record, how.ssh_config, how.log, attach(record, fleet), plan)


def _without_sweep(job: Job) -> Job:
    if job.sweep:
        what = f"is a sweep of {len(job.sweep)} variants, and this starts one run"
        raise UsageError(f"job {job.name}", what, "for each: launcher.up(variant) of launcher.api.up.variants(job)")
    return job


def variants(job: JobLike) -> list[tuple[Job, Membership | None]]:
    """The jobs of a sweep, each with its place in one new group; of a job without a sweep the job itself, with None."""
    loaded = load(job)
    group = new_run_id(loaded.name)
    places: list[Membership | None] = [Membership(group, variant_name(variant)) for variant in loaded.sweep]
    return list(zip(expand_sweep(loaded), places or [None], strict=True))


def up_array(
    job: JobLike, on: str, *, resume: str | None = None, log: Log = print, ssh_config: str | PathLike[str] | None = None
) -> list[Run]:
    """Submit the variants of a sweep to a cluster as one job array: all of them, or none when this raises."""
    how = How(_earlier(resume), log=log, ssh_config=chosen_config(ssh_config))
    with until_started(how.started):
        return _submit(variants(job), on, how)


@dataclass(frozen=True)
class Inputs:
    """What a run needs from the caller's machine. code: packed while the nodes connect; `code()` waits for it."""

    secrets: Mapping[str, str] = field(repr=False)
    code: Future[Snapshot]


def inputs_of(job: Job, log: Log) -> Inputs:
    """Raises JobInvalid where a file that the job names is missing."""
    here = Path.cwd()
    check_files(job, here, os.environ)
    return Inputs(read_secrets(job, here, os.environ), in_background(partial(pack, job, here, log)))


def _earlier(resume: str | None) -> RunId | None:
    """A whole id needs no record here. Raises RunUnknown."""
    return resume if resume is None or is_run_id(resume) else find(resume).run


def _record(job: Job, plan: Plan, inputs: Inputs, group: Membership | None, how: How) -> Record:
    """runs/<run id>/, with what is known before anything starts."""
    for warning in plan.warnings:
        how.log(f"warning: {warning}")
    record = Record.create(plan, dump_job(job), inputs.code().archive, secrets=list(inputs.secrets.values()))
    if group is not None:
        record.event(GROUPED, group=group.group, variant=group.variant)
    if how.resume is not None:
        record.event("resumes", earlier=how.resume)
    return record


def _start(plan: Plan, record: Record, fleet: Fleet, inputs: Inputs, how: How, waiting: Waiting) -> None:
    """Start it, where it may wait as soon as its GPUs are free. The record of a run that never started says why."""
    code = inputs.code().archive
    try:
        with ExitStack() as held:
            fill = None
            if how.resume is not None:
                required = not how.fresh_without
                found = checkpoints_of(how.resume, plan, fleet, how.ssh_config, how.log, required=required)
                fill = held.enter_context(found)
            while True:
                try:
                    return start(plan, fleet, code, inputs.secrets, record.event, fill)
                except NodesFailed as error:
                    waiting.after(error)
    except LauncherError as error:
        if how.tries_again and isinstance(error, NodesFailed) and all(isinstance(e, InUse) for e in error.errors):
            record.remove()
        else:
            record.finish({"state": "failed", "exit_code": error.exit_code, "why": str(error)})
        raise
    except KeyboardInterrupt:
        record.finish({"state": "stopped", "exit_code": StoppedByUser.exit_code, "why": "Ctrl-C before it started"})
        raise


def _submit(jobs: Sequence[tuple[Job, Membership | None]], on: str, how: How) -> list[Run]:
    """Several jobs are one job array; the last one to be started submits it. The runs share a connection."""
    ids = tuple(new_run_id(job.name) for job, _ in jobs)
    array, made, plans = ids if len(ids) > 1 else (), list[Record](), list[Plan]()
    cluster, host = read_settings(os.environ).cluster(on), cluster_host(on)
    with ExitStack() as on_error:
        fleet = on_error.enter_context(connect([(host, host)], None, how.ssh_config, ping=False))
        try:
            for (job, group), run in zip(jobs, ids, strict=True):
                inputs = inputs_of(job, how.log)
                plan = plan_on(job, cluster, fleet.engines[0], inputs.code().digest, run, array)
                plans.append(plan)
                made.append(_record(job, plan, inputs, group, how))
                _start(plan, made[-1], fleet, inputs, how, Waiting(how.log, wait=False))
        except BaseException as error:
            _undo(made, fleet, error)
            raise
        how.started.set()
        on_error.pop_all()
    runs = zip(made, plans, strict=True)  # over one connection: another one might ask for a password again
    return [Run(record, how.ssh_config, how.log, attach(record, fleet), plan) for record, plan in runs]


def _undo(made: Sequence[Record], fleet: Fleet, cause: BaseException) -> None:
    """Remove the variants of an array that was not submitted, as far as they were created."""
    code = cause.exit_code if isinstance(cause, LauncherError) else StoppedByUser.exit_code
    for record in made[:-1]:  # the last one is undone by its start
        stop(fleet, record.run)
        master = attach(record, fleet).nodes[0]
        output_folder.remove(fleet.engines[0].files, master.output, record.run)
        record.finish({"state": RunState.FAILED, "exit_code": code, "why": str(cause)})
