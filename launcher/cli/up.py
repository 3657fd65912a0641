"""`launcher up`: load, connect, facts, image, plan, start, follow, finish."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli import options
from launcher.errors import GpuInUse, LauncherError, NodesFailed, StoppedByUser, UsageError
from launcher.job.dump import dump_job
from launcher.job.files import check_files, code_folder, read_secrets
from launcher.job.loader import load_job
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep, variant_name
from launcher.logs.lines import Masker
from launcher.model.plan import Membership, Plan, RunId, is_run_id, new_run_id
from launcher.node.connect import Fleet, connect
from launcher.node.parallel import in_background

if TYPE_CHECKING:  # loaded while the nodes shake hands
    from launcher.records.snapshot import Snapshot
    from launcher.records.store import Record
    from launcher.run.notice import Notify

Say = Callable[[str], None]
WAIT_FOR_GPUS = 3.0  # seconds between two tries


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
            help="Begin with a copy of an earlier run's checkpoints, on the same nodes.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for GPUs that another run has.")] = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Ctrl-C leaves the run going and says how to come back; a second one stops it.

    Exit codes: 0 done or detached, 1 the job failed, 2 the job file is wrong, 3 a node is unreachable or unfit,
    4 the image, 5 stopped, 6 not every node confirmed.
    """
    loaded = load_job(job, sets or [], options.hosts(nodes))
    earlier = None if resume is None else _earlier(resume)
    if detach and loaded.sweep:
        raise UsageError(
            f"{job}: sweep",
            "its variants run one after another, and with -d nobody would be there to start the next",
            "leave -d out; to go on without a terminal: nohup launcher up JOB &",
        )
    code, group = 0, new_run_id(loaded.name)
    places: list[Membership | None] = [Membership(group, variant_name(variant)) for variant in loaded.sweep]
    for variant, place in zip(expand_sweep(loaded), places or [None], strict=True):
        ended = run_one(variant, options.UpOptions(detach, earlier, wait, place, job), ssh_config)
        code = max(code, ended or 0)
        if ended in (None, StoppedByUser.exit_code):  # the user has left, or does not want the rest either
            break
    sys.exit(code)


def _earlier(text: str) -> RunId:
    """The run that is meant: a whole id needs no record here."""
    if is_run_id(text):
        return text
    from launcher.records.store import find

    return find(text).run


def run_one(job: Job, wishes: options.UpOptions, ssh_config: Path | None) -> int | None:
    """One run of one job, from the file to its end; the exit code, None where it was left running."""
    check_files(job, Path.cwd(), os.environ)
    secrets = read_secrets(job, Path.cwd(), os.environ)
    packed = in_background(lambda: _pack(job))
    with connect([(entry.name, entry.host) for entry in job.nodes], job.runtime, ssh_config, ping=False) as fleet:
        code = packed()
        from launcher.cli.reporter import Reporter
        from launcher.records.store import Record
        from launcher.run.notice import read_settings, settings_file

        say = Reporter().say
        notify = read_settings(settings_file(os.environ)).notify  # now: an error in it is told before anything starts
        plan = _plan(job, fleet, code, say, wishes)
        record = Record.create(plan, dump_job(job), code.archive)
        _start(plan, record, fleet, code, secrets, say, wishes)
        meeting = plan.rendezvous
        say(f"{plan.run} runs on {', '.join(n.node for n in plan.nodes)}, meeting at {meeting.address}:{meeting.port}")
        if wishes.detach:
            say(f"{plan.run} is running. Follow it: launcher logs {plan.run}")
            return None
        return _follow(record, fleet, Masker(secrets.values()), notify)


def _pack(job: Job) -> Snapshot:
    """The code's archive; what is needed once the nodes are connected is loaded while they shake hands."""
    import launcher.cli.bars
    import launcher.run.prepare
    import launcher.run.start  # noqa: F401
    from launcher.records.snapshot import snapshot

    return snapshot(code_folder(job, Path.cwd()))


def _plan(job: Job, fleet: Fleet, code: Snapshot, say: Say, wishes: options.UpOptions) -> Plan:
    from launcher.cli.bars import bars
    from launcher.image.lock import path_beside
    from launcher.run.prepare import prepare

    with bars() as tell:
        pin = None if wishes.file is None else path_beside(wishes.file)
        plan = prepare(job, fleet, code.digest, say, tell, lock_file=pin)
    for warning in plan.warnings:
        say(f"warning: {warning}")
    return plan


def _start(
    plan: Plan,
    record: Record,
    fleet: Fleet,
    code: Snapshot,
    secrets: Mapping[str, str],
    say: Say,
    wishes: options.UpOptions,
) -> None:
    """The record of a run that never started says why."""
    from launcher.records.groups import GROUPED
    from launcher.run.start import start

    if wishes.place is not None:
        record.event(GROUPED, group=wishes.place.group, variant=wishes.place.variant)
    if wishes.resume is not None:
        record.event("resumes", earlier=wishes.resume)
    try:
        while True:
            try:
                return start(plan, fleet, code.archive, secrets, record.event, wishes.resume)
            except NodesFailed as error:
                if not wishes.wait or not all(isinstance(each, GpuInUse) for each in error.errors):
                    raise
                say("waiting: " + "; ".join(f"{each.where}: {each.what}" for each in error.errors))
                time.sleep(WAIT_FOR_GPUS + random.random())  # noqa: S311 - two that wait must not keep in step
    except LauncherError as error:
        record.finish({"run": record.run, "state": "failed", "exit_code": error.exit_code, "why": str(error)})
        raise


def _follow(record: Record, fleet: Fleet, masker: Masker, notify: Notify) -> int | None:
    """The exit code, None where the run was left running."""
    try:
        from launcher.cli import follow  # loaded while the containers come up
        from launcher.cli.console import Screen
        from launcher.records.paths import NodePaths
        from launcher.run.follow import Followed
        from launcher.run.state import RunState
        from launcher.run.stop import stop
    except KeyboardInterrupt:
        from launcher.cli.reporter import Reporter, way_back

        Reporter().say(way_back(record.run))
        return None
    nodes = record.nodes()
    shown = [Followed(nodes[0], NodePaths(nodes[0].output, nodes[0].name).log)]
    with Screen(masker) as screen:
        try:
            engines = {engine.node: engine for engine in fleet.engines}
            outcome = follow.follow(record, engines, nodes, shown, screen, notify, resumed=False)
        except KeyboardInterrupt:
            return follow.leave_or_stop(record, fleet, screen)
    if outcome.state is not RunState.DONE:
        # All that they knew has been read and written down: nothing is left on the nodes but the output folders.
        stop(fleet, record.run)
    return outcome.state.exit_code
