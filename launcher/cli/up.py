"""`launcher up`: load, connect, facts, image, plan, start, follow, finish."""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
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
from launcher.node.connect import CLUSTER, Fleet, connect
from launcher.node.parallel import in_background

if TYPE_CHECKING:  # loaded while the nodes shake hands
    from launcher.image.image_locations import Log
    from launcher.records.snapshot import Snapshot
    from launcher.records.store import Record
    from launcher.run.locate import Attached

WAIT_FOR_GPUS = 3.0  # seconds between two tries


@dataclass(frozen=True)
class UpOptions:
    """The options of one run.

    file: the job file, beside which its image is pinned. resume: an earlier run, whose checkpoints it begins with.
    wait: for GPUs that another run has. place: in a group, where the run is one of several variants.
    raw: pass the output's terminal sequences. on: a cluster of the settings file, instead of the job's nodes.
    """

    file: Path
    detach: bool
    resume: RunId | None
    wait: bool
    place: Membership | None
    raw: bool
    on: str | None = None


def up(
    job: options.JobFile,
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Start it and return; `launcher logs` follows.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Begin with an earlier run's newest checkpoint, wherever it is: on a node of it, or fetched here.",
        ),
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
    earlier = None if resume is None else _earlier(resume)
    if detach and loaded.sweep and on is None:
        raise UsageError(
            f"{job}: sweep",
            "its variants run one after another, and with -d nothing would start the next",
            "leave -d out; to go on without a terminal: nohup launcher up JOB &",
        )
    code, group = 0, new_run_id(loaded.name)
    places: list[Membership | None] = [Membership(group, variant_name(variant)) for variant in loaded.sweep]
    for variant, place in zip(expand_sweep(loaded), places or [None], strict=True):
        ended = run_one(variant, UpOptions(job, detach, earlier, wait, place, raw, on), ssh_config)
        code = max(code, ended or 0)
        if detach and on is not None:  # the cluster runs the variants as it has room for them
            continue
        if ended in (None, StoppedByUser.exit_code):  # the user has left, or does not want the rest either
            break
    sys.exit(code)


def _earlier(text: str) -> RunId:
    """The run that is meant: a whole id needs no record here."""
    if is_run_id(text):
        return text
    from launcher.records.store import find

    return find(text).run


def run_one(job: Job, chosen: UpOptions, ssh_config: Path | None) -> int | None:
    """One run of one job, from the file to its end; the exit code, None where it was left running."""
    check_files(job, Path.cwd(), os.environ)
    secrets = read_secrets(job, Path.cwd(), os.environ)
    packed = in_background(lambda: _pack(job))
    hosts = [(entry.name, entry.host) for entry in job.machines]
    if chosen.on is not None:
        hosts = [(CLUSTER + chosen.on, CLUSTER + chosen.on)]
    with connect(hosts, job.runtime, ssh_config, ping=False) as fleet:
        code = packed()
        from launcher.cli.bars import bars
        from launcher.cli.reporter import Reporter
        from launcher.image.lock import path_beside
        from launcher.job.settings import read_settings
        from launcher.records.paths import NodePaths
        from launcher.records.store import Record
        from launcher.run.prepare import prepare

        reporter = Reporter()
        log = reporter.log
        notify = read_settings(os.environ).notify  # now: its errors are reported before anything starts
        if chosen.on is not None:
            from launcher.run.cluster import plan_on

            plan = plan_on(job, fleet.engines[0], code.digest)
        else:
            facts = fleet.facts()
            with bars() as on_progress:
                plan = prepare(job, fleet, facts, code.digest, log, on_progress, path_beside(chosen.file))
        for warning in plan.warnings:
            reporter.warn(warning)
        record = Record.create(plan, dump_job(job), code.archive, secrets=list(secrets.values()))
        from launcher.cli.console import Screen
        from launcher.cli.foreground import leave_or_stop, show_until_end
        from launcher.run.followed import Followed
        from launcher.run.locate import Attached, engine_of
        from launcher.run.state import RunState
        from launcher.run.stop import stop

        _start(plan, record, fleet, code, secrets, log, chosen, ssh_config)
        nodes = record.nodes()
        engines = {engine.node: engine for engine in fleet.engines}
        attached = Attached(record, nodes, {node.name: engines[engine_of(node)[0]] for node in nodes}, fleet)
        with Screen(record.mask, raw=chosen.raw) as screen:
            try:
                log(_where(plan, attached))
                if chosen.detach:
                    log(f"{plan.run} is running. Follow it: launcher logs {plan.run}")
                    return None
                log_of_master = NodePaths(nodes[0].output, nodes[0].name).log
                shown = [Followed(nodes[0], log_of_master, moves=plan.min_nodes > 0)]
                outcome = show_until_end(attached, shown, screen, notify, resumed=False)
            except KeyboardInterrupt:
                return leave_or_stop(attached, screen)
        if outcome.state not in (RunState.DONE, RunState.STOPPED):  # who stopped it elsewhere removes it too
            # All evidence has been read and recorded: nothing is left on the nodes but the output folders.
            try:
                stop(fleet, record.run)
            except NodesFailed as left:
                log(f"warning: something may be left there; when it is back: launcher down {record.run}\n{left}")
        return outcome.state.exit_code


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
    import launcher.cli.bars
    import launcher.run.prepare
    import launcher.run.start  # noqa: F401
    from launcher.records.snapshot import snapshot

    in_background(lambda: importlib.import_module("launcher.cli.foreground"))
    return snapshot(code_folder(job, Path.cwd()))


def _start(
    plan: Plan,
    record: Record,
    fleet: Fleet,
    code: Snapshot,
    secrets: Mapping[str, str],
    log: Log,
    chosen: UpOptions,
    ssh_config: Path | None,
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
                fill = held.enter_context(checkpoints_of(chosen.resume, plan, fleet, ssh_config, log))
            while True:
                try:
                    return start(plan, fleet, code.archive, secrets, record.event, fill)
                except NodesFailed as error:
                    if not chosen.wait or not all(isinstance(each, InUse) for each in error.errors):
                        raise
                    log("waiting: " + "; ".join(f"{each.where}: {each.what}" for each in error.errors))
                    time.sleep(WAIT_FOR_GPUS + random.random())  # noqa: S311 - two that wait must not keep in step
    except LauncherError as error:
        record.finish({"run": record.run, "state": "failed", "exit_code": error.exit_code, "why": str(error)})
        raise
