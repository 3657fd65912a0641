"""Start runs on the machines of a job, or on a cluster."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path

from launcher.api.jobs import JobLike, load
from launcher.api.run import Run
from launcher.api.until_started import until_started
from launcher.errors import InUse, LauncherError, NodesFailed, PortInUse, RunUnknown, StoppedByUser, UsageError
from launcher.extras import extra
from launcher.image.lock import lock_path
from launcher.job.arguments import merged
from launcher.job.dump import dump_job
from launcher.job.files import check_files, hidden, read_secrets
from launcher.job.models import Job
from launcher.job.settings import read_settings
from launcher.model.host import cluster_host
from launcher.model.plan import Membership, Plan, RunId, is_run_id, new_run_id
from launcher.model.progress import Log, OnProgress, no_progress, silent
from launcher.node.connect import Fleet, connect
from launcher.node.parallel import Future, in_background
from launcher.node.ssh.config import chosen_config
from launcher.planning.allotment import allot
from launcher.planning.containers import in_group
from launcher.records import sweeps
from launcher.records.exported import exported
from launcher.records.masking import hide
from launcher.records.options import notes
from launcher.records.paths import RUNS, RunPaths
from launcher.records.revisions import resolved
from launcher.records.snapshot import CodeListing, Snapshot, list_code, pack
from launcher.records.store import Record, find
from launcher.records.trainer import TRAINER, check_options
from launcher.run.begin.earlier import files_of
from launcher.run.begin.gpus import Waiting, counts, job_facts, wait_for_gpus
from launcher.run.begin.prepare import make_plan, prepare
from launcher.run.begin.start import start
from launcher.run.cluster import kind_of
from launcher.run.locate import connected_run
from launcher.run.tidy import remove_done

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
    run: RunId | None = None  # its ID; None: a new one
    watched: bool = True  # somebody may answer a breakpoint() of the program
    together: Sequence[RunId] = ()  # runs on a cluster that start when the last one does: one request for all of them


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
    options = StartOptions(run_to_resume(earlier), False, wait, log, progress or no_progress, chosen_config(ssh_config))
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
        options.started.set()
        on_error.pop_all()
        return run


def start_on(
    fleet: Fleet, job: Job, destination: Destination, inputs: Inputs, group: Membership | None, options: StartOptions
) -> Run:
    """The same on connected nodes, which the caller closes if an error is raised."""
    said = list[str]()
    tidying = in_background(partial(_tidy, job, fleet, group, options, said.append))
    try:
        waiting = Waiting(options.log, wait=options.wait, runs=options.here / RUNS)
        watched = group is None and os.environ.get("CI", "").lower() not in ("1", "true")
        planned = destination.plan(job, fleet, inputs, waiting, replace(options, watched=watched))
        planned = planned if group is None else planned.in_group(group)
        record = Record.of(planned.plan, hidden(inputs.secrets, job.env), options.here / RUNS)
        plan = _start(job, planned, record, fleet, inputs, group, options, waiting)
    finally:
        tidying()
    for text in said:
        options.log(text)
    return Run(record, options.ssh_config, options.log, connected_run(record, fleet), plan)


def _tidy(job: Job, fleet: Fleet, group: Membership | None, options: StartOptions, say: Log) -> None:
    """Remove what is left of earlier runs of the job, while this one is prepared. A sweep has parallel variants."""
    if group is None:
        removing = partial(remove_done, job.name, fleet, options.here / RUNS, options.resume, say)
        extra("warning: containers of earlier runs were not removed", removing, None, say)


@dataclass(frozen=True)
class Planned:
    """A plan. again: makes it with newer facts, after another run has taken its port; None if the job gives the port.

    again raises NodesFailed if no port is free.
    """

    plan: Plan
    again: Callable[[], Plan] | None = None

    def in_group(self, group: Membership) -> Planned:
        """Return the same for a run of a sweep."""
        again = self.again
        return Planned(in_group(self.plan, group), again and (lambda: in_group(again(), group)))


@dataclass(frozen=True)
class Destination:
    """Where a run starts: the machines of its job, or a cluster.

    hosts: (node name, host). plan: what is done from the connected nodes to the plan. bare: the code is not sent into a
    container, whatever the job's runtime is. may_ask: to connect may need a password, before which nothing is printed.
    starts_together: several runs can be one request.
    """

    hosts: Sequence[tuple[str, str]]
    runtime: str | None
    plan: Callable[[Job, Fleet, Inputs, Waiting, StartOptions], Planned]
    bare: bool = False
    may_ask: bool = False
    starts_together: bool = False

    def connect(self, ssh_config: Path | None) -> Fleet:
        """Raises NodesFailed."""
        return connect(self.hosts, self.runtime, ssh_config, ping=False)


def own_machines(job: Job) -> Destination:
    return Destination(job.hosts(), job.runtime, _plan_on_machines)


def _plan_on_machines(job: Job, fleet: Fleet, inputs: Inputs, waiting: Waiting, options: StartOptions) -> Planned:
    """Gather facts, prepare image, data and addresses, and plan."""
    allotment, checked_at = wait_for_gpus(job, fleet, waiting), time.monotonic()
    code = inputs.packed(options.log)
    lock = options.here / lock_path(job.file) if job.file else None
    prepared = prepare(job, fleet, allotment, options.log, options.progress, lock, here=options.here)
    if counts(job) and time.monotonic() - checked_at > STALE:
        prepared = prepared.at(wait_for_gpus(job, fleet, waiting))
    plan = make_plan(job, prepared, code.digest, options.run, watched=options.watched)

    def again() -> Plan:
        newer = prepared.at(allot(job, job_facts(job, fleet)))
        return make_plan(job, newer, code.digest, plan.run, watched=options.watched)

    return Planned(plan, again if len(job.ports) > 1 else None)


def on_cluster(name: str) -> Destination:
    """Return a cluster of the settings file, which chooses the machines. Raises UsageError."""
    cluster, host = read_settings(os.environ).cluster(name), cluster_host(name)
    kind = kind_of(cluster)

    def plan(job: Job, fleet: Fleet, inputs: Inputs, _: Waiting, options: StartOptions) -> Planned:
        code, run = inputs.packed(options.log), options.run or new_run_id(job.name)
        return Planned(kind.plan(job, cluster, fleet.engines[0], code.digest, run, options.together))

    bare = cluster.container == "none"
    return Destination([(host, host)], None, plan, bare, may_ask=True, starts_together=kind.starts_together)


def _without_sweep(job: Job) -> Job:
    if job.sweep:
        what = f"is a sweep of {len(job.sweep)} variants, but launcher.up starts a single run"
        fix = "run all: launcher up JOB; or start one: launcher.load(JOB, set={'sweep': None, 'run.args.KEY': VALUE})"
        raise UsageError(f"job {job.name}", what, fix)
    return job


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run from the caller's machine. code: packed while the nodes connect; `code()` waits for it."""

    secrets: Mapping[str, str] = field(repr=False)
    code: Future[Snapshot]
    messages: Sequence[str]  # of packing: not printed by its thread, as nobody waits for it if connecting fails

    def packed(self, log: Log) -> Snapshot:
        """Wait for the code and report what is sent and what is left out."""
        said, ready = 0, False
        while not ready:
            ready = self.code.wait(1.0)
            for message in self.messages[said:]:
                log(message)
                said += 1
        return self.code()


def inputs_of(job: Job, destination: Destination, log: Log, here: Path | None = None) -> Inputs:
    """Read the inputs of a run. here: the folder of relative paths; None: the working directory.

    Raises JobInvalid like `list_code` and `exported`, and if a file of the job is missing.
    """
    here, messages = here or Path.cwd(), list[str]()
    now = messages.append if destination.may_ask else log
    with ExitStack() as held:
        code = held.enter_context(exported(job, here))
        check_files(job, here, os.environ, code.folder if code else None)
        listing = list_code(job, here, now, bare=destination.bare, exported=code)
        check_options(job, listing.folder, listing.trainer, now)
        for note in notes(job, listing):
            now(f"warning: {note}")
        secrets = read_secrets(job, here, os.environ)
        hide(secrets.values())
        until_packed = held.pop_all()
    return Inputs(secrets, in_background(partial(_packed, listing, messages.append, until_packed)), messages)


def inputs_had(job: Job, had: Record, log: Log, here: Path | None = None) -> Inputs:
    """Return the inputs of a run with the code of an earlier one, as it was sent. here: as for `inputs_of`.

    Raises UsageError if that code is not here any more, and as `inputs_of` for secrets.
    """
    secrets = read_secrets(job, here or Path.cwd(), os.environ)
    hide(secrets.values())
    try:
        archive = had.code()
    except OSError as error:
        fix = f"repeat the command that started it, without --resume; its code: {had.paths.code}"
        raise UsageError(had.run, f"its code cannot be read: {error.strerror}", fix) from None
    place, left_out = had.left_out()
    code = Snapshot(archive, had.code_digest or "", place, left_out, had.revision)
    log(f"code: that of {had.run}")
    return Inputs(secrets, in_background(lambda: code), ())


def _packed(listing: CodeListing, log: Log, held: ExitStack) -> Snapshot:
    with held:
        return pack(listing, log)


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


def run_to_resume(text: str | None) -> RunId | None:
    """Return the ID of the run to resume; a complete ID needs no local record. Raises RunUnknown."""
    if text is None or is_run_id(text):
        return text
    try:
        return find(text).run
    except RunUnknown as unknown:
        if "--nodes" not in unknown.next_step:
            raise
        fix = "call `up` in the folder where it was started, or give its whole ID: launcher runs --nodes a,b"
        raise RunUnknown(unknown.where, unknown.what, fix) from None


def _write(
    record: Record, plan: Plan, job: Job, code: Snapshot, group: Membership | None, resume: RunId | None
) -> None:
    """Write runs/<run id>/ with everything that is known before the start."""
    record.write(plan, dump_job(job), code.archive, group)
    if group is not None:
        sweeps.keep(group, record.mask, record.paths.root.parent)
    record.write_left_out(code.folder, code.left_out)
    if code.revision is not None:
        record.of_revision(code.revision)
    if job.is_of_file:
        record.event("job", file=str(job.file))
    if resume is not None:
        record.event("resumes", earlier=resume)


def _until_started(planned: Planned, begin: Callable[[Plan], None], record: Record, waiting: Waiting) -> Plan:
    """Start the run, with another port if another run has taken its own, and again after a wait if it may wait."""
    plan = planned.plan
    while True:
        try:
            begin(plan)
        except NodesFailed as error:
            if planned.again is None or not all(isinstance(each, PortInUse) for each in error.errors):
                waiting.after(error)
                continue
            waiting.log(f"{error.errors[0].what}: another port is used")
        else:
            return plan
        try:
            plan = planned.again()
        except NodesFailed as error:
            waiting.after(error)
        else:
            record.write_plan(plan)


def _start(
    job: Job,
    planned: Planned,
    record: Record,
    fleet: Fleet,
    inputs: Inputs,
    group: Membership | None,
    options: StartOptions,
    waiting: Waiting,
) -> Plan:
    """Record the run and start it, once its GPUs are free if it may wait. Return the plan that was started.

    On failure, the reason is recorded.
    """
    plan = planned.plan
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
            return _until_started(
                planned,
                partial(start, fleet=fleet, code=code, secrets=inputs.secrets, event=record.event, fill=fill),
                record,
                waiting,
            )
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
