"""`launcher up`: load, connect, facts, image, plan, start, follow, finish."""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli import options
from launcher.errors import InUse, LauncherError, NodesFailed, StoppedByUser, UsageError
from launcher.job.dump import dump_job
from launcher.job.files import check_files, code_folder, read_secrets
from launcher.job.loader import load_job
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep, variant_name
from launcher.model.plan import Membership, Plan, RunId, is_run_id, new_run_id
from launcher.node.connect import Fleet, connect
from launcher.node.parallel import in_background

if TYPE_CHECKING:  # loaded while the nodes shake hands
    from launcher.image.image_locations import Log
    from launcher.records.snapshot import Snapshot
    from launcher.records.store import Record
    from launcher.run.locate import Attached

WAIT_FOR_GPUS = 3.0  # seconds between two tries


@dataclass(frozen=True)
class UpOptions:
    """The options of one run."""

    file: Path  # of the job; its image is pinned beside it
    ssh_config: Path | None = None
    detach: bool = False
    resume: RunId | None = None  # an earlier run, whose checkpoints it begins with
    wait: bool = False  # for GPUs that another run has
    raw: bool = False  # pass the output's terminal sequences
    on: str | None = None  # a cluster of the settings file, instead of the job's nodes
    place: Membership | None = None  # in a group, where the run is one of several variants
    run: RunId | None = None  # its id, where that is chosen already
    sweep: tuple[RunId, ...] = ()  # all runs of its group, where they are one job array of a cluster


def up(
    job: options.JobFile,
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Start it and return; `launcher logs` follows.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Begin with an earlier run's newest checkpoint, on a node or fetched here."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for GPUs that another run has.")] = False,
    raw: options.Raw = False,
    on: options.On = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """Ctrl-C leaves the run going and prints how to come back; a second one stops it.

    Exit codes: 0 done or detached, 1 the job failed, 2 the job file is wrong, 3 a node is unreachable or unfit,
    4 the image, 5 stopped, 6 not every node confirmed.
    """
    loaded = load_job(job, sets or [], options.hosts(nodes))
    if resume is not None and not is_run_id(resume):  # a whole id needs no record here
        from launcher.records.store import find

        resume = find(resume).run
    if detach and loaded.sweep and on is None:
        raise UsageError(
            f"{job}: sweep",
            "its variants run one after another, and with -d nothing would start the next",
            "leave -d out; to go on without a terminal: nohup launcher up JOB &",
        )
    code, group = 0, new_run_id(loaded.name)
    places: list[Membership | None] = [Membership(group, variant_name(variant)) for variant in loaded.sweep]
    chosen = UpOptions(job, ssh_config, detach, resume, wait, raw, on)
    own = [replace(chosen, place=place) for place in places or [None]]
    variants = list(zip(expand_sweep(loaded), own, strict=True))
    if on is not None and loaded.sweep:
        sys.exit(_run_array(variants, group))
    for variant in variants:
        ended = run_one(*variant)
        code = max(code, ended or 0)
        if ended in (None, StoppedByUser.exit_code):  # the user has left, or does not want the rest either
            break
    sys.exit(code)


def run_one(job: Job, chosen: UpOptions) -> int | None:
    """One run of one job, from the file to its end; the exit code, None where it was left running."""
    check_files(job, Path.cwd(), os.environ)
    secrets = read_secrets(job, Path.cwd(), os.environ)
    packed = in_background(lambda: _pack(job))
    cluster = options.hosts(None, chosen.on)
    hosts = [(host, host) for host in cluster] if cluster else [(entry.name, entry.host) for entry in job.machines]
    with connect(hosts, job.runtime, chosen.ssh_config, ping=False) as fleet:
        code = packed()
        from launcher.cli.terminal import Reporter, bars
        from launcher.image.lock import path_beside
        from launcher.records.store import Record
        from launcher.run.prepare import prepare

        reporter = Reporter()
        log = reporter.log
        if chosen.on is not None:
            from launcher.run.cluster import plan_on

            plan = plan_on(job, fleet.engines[0], code.digest, chosen.run or new_run_id(job.name), chosen.sweep)
        else:
            facts = fleet.facts()
            with bars() as on_progress:
                plan = prepare(job, fleet, facts, code.digest, log, on_progress, path_beside(chosen.file))
        for warning in plan.warnings:
            reporter.warn(warning)
        record = Record.create(plan, dump_job(job), code.archive, secrets=list(secrets.values()))
        from launcher.cli.console import Screen
        from launcher.cli.foreground import follow, leave_or_stop
        from launcher.run.locate import Attached, engine_of

        _start(plan, record, fleet, code.archive, secrets, log, chosen)
        if chosen.sweep:
            return None
        nodes = record.nodes()
        engines = {engine.node: engine for engine in fleet.engines}
        attached = Attached(record, nodes, {node.name: engines[engine_of(node)[0]] for node in nodes}, fleet)
        with Screen(record.mask, raw=chosen.raw) as screen:
            try:
                log(_where(plan, attached))
                if chosen.detach:
                    log(f"{plan.run} is running. Follow it: launcher logs {plan.run}")
                    return None
            except KeyboardInterrupt:
                return leave_or_stop(attached, screen)
            return follow(attached, screen, resumed=False)


def _run_array(variants: Sequence[tuple[Job, UpOptions]], group: RunId) -> int:
    """The variants of a sweep as one job array of a cluster, all of them or none; the exit code."""
    runs, chosen = tuple(new_run_id(job.name) for job, _ in variants), variants[0][1]
    try:
        for (job, own), run in zip(variants, runs, strict=True):
            run_one(job, replace(own, run=run, sweep=runs))
    except BaseException as error:
        from launcher.cli.foreground import undo_array

        undo_array(runs, error, chosen.ssh_config)
        raise
    from launcher.cli.foreground import show_array
    from launcher.cli.terminal import Reporter

    Reporter().log(f"{len(runs)} variants are submitted as one job array; the results: launcher compare {group}")
    return 0 if chosen.detach else show_array(runs, chosen.ssh_config, raw=chosen.raw)


def _where(plan: Plan, attached: Attached) -> str:
    if not plan.rendezvous.address:  # the cluster chooses
        state = attached.engines[plan.master.node].wait(plan.master.container.name, 0)
        return f"{plan.run} is submitted to {plan.master.host}, {state.error or state.phase.value}"
    meeting = f"{plan.rendezvous.address}:{plan.rendezvous.port}"
    names = [node.node for node in plan.nodes]
    size = len(names) - plan.spares
    spares = f" (spare: {', '.join(names[size:])})" if plan.spares else ""
    return f"{plan.run} runs on {', '.join(names[:size])}{spares}, meeting at {meeting}"


def _pack(job: Job) -> Snapshot:
    """The code's archive. Modules for later steps are imported meanwhile, so that no step waits for its own."""
    import launcher.cli.terminal
    import launcher.run.prepare
    import launcher.run.start  # noqa: F401
    from launcher.records.snapshot import snapshot

    in_background(lambda: importlib.import_module("launcher.cli.foreground"))
    return snapshot(code_folder(job, Path.cwd()))


def _start(
    plan: Plan, record: Record, fleet: Fleet, code: bytes, secrets: Mapping[str, str], log: Log, chosen: UpOptions
) -> None:
    """Start it, with --wait as soon as its GPUs are free. The record of a run that never started says why."""
    from launcher.records.groups import GROUPED
    from launcher.run.earlier import checkpoints_of
    from launcher.run.start import start

    if chosen.place is not None:
        record.event(GROUPED, group=chosen.place.group, variant=chosen.place.variant)
    if chosen.resume is not None:
        record.event("resumes", earlier=chosen.resume)
    try:
        with ExitStack() as held:
            fill = None
            if chosen.resume is not None:
                fill = held.enter_context(checkpoints_of(chosen.resume, plan, fleet, chosen.ssh_config, log))
            while True:
                try:
                    return start(plan, fleet, code, secrets, record.event, fill)
                except NodesFailed as error:
                    if not chosen.wait or not all(isinstance(each, InUse) for each in error.errors):
                        raise
                    log("waiting: " + "; ".join(f"{each.where}: {each.what}" for each in error.errors))
                    time.sleep(WAIT_FOR_GPUS + random.random())  # noqa: S311 - two that wait must not keep in step
    except LauncherError as error:
        record.finish({"state": "failed", "exit_code": error.exit_code, "why": str(error)})
        raise
