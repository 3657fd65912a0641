"""A run from connected nodes to its end: image, plan, start, output, what Ctrl-C does."""

from __future__ import annotations

import os
import random
import time

from launcher.cli.bars import bars
from launcher.cli.options import UpOptions
from launcher.cli.reporter import Reporter, way_back
from launcher.errors import GpuInUse, LauncherError, NodesFailed
from launcher.image.lock import path_beside
from launcher.image.places import Say
from launcher.job.dump import dump_job
from launcher.job.models import Job
from launcher.logs.lines import Masker
from launcher.node.connect import Fleet
from launcher.records.groups import GROUPED
from launcher.records.snapshot import Snapshot
from launcher.records.store import Record
from launcher.run.notice import read_settings, settings_file
from launcher.run.prepare import prepare
from launcher.run.start import start
from launcher.run.state import RunState

WAIT_FOR_GPUS = 3.0  # seconds between two tries


def attend(job: Job, fleet: Fleet, code: Snapshot, secrets: dict[str, str], wishes: UpOptions) -> int | None:
    """Start the run and go along with it; the exit code, None where it was left running."""
    notify = read_settings(settings_file(os.environ)).notify  # now: what is wrong in it is told before anything starts
    say = Reporter().say
    record = launch(job, fleet, code, secrets, say, wishes)
    if wishes.detach:
        say(f"{record.run} is running. Follow it: launcher logs {record.run}")
        return None
    try:
        from launcher.cli.console import Screen
        from launcher.cli.follow import follow  # loaded while the containers come up
    except KeyboardInterrupt:
        say(way_back(record.run))
        return None
    with Screen(Masker(secrets.values())) as screen:
        return follow(record, fleet, screen, notify)


def launch(job: Job, fleet: Fleet, code: Snapshot, secrets: dict[str, str], say: Say, wishes: UpOptions) -> Record:
    """Image, plan, record, start; the record of a run that never started says why."""
    with bars() as tell:
        pin = None if wishes.file is None else path_beside(wishes.file)
        plan = prepare(job, fleet, code.digest, say, tell, lock_file=pin)
    for warning in plan.warnings:
        say(f"warning: {warning}")
    record = Record.create(plan, dump_job(job), code.archive)
    if wishes.place is not None:
        record.event(GROUPED, group=wishes.place.group, variant=wishes.place.variant)
    if wishes.resume is not None:
        record.event("resumes", earlier=wishes.resume)
    try:
        while True:
            try:
                start(plan, fleet, code.archive, secrets, record.event, wishes.resume)
                break
            except NodesFailed as error:
                if not wishes.wait or not all(isinstance(each, GpuInUse) for each in error.errors):
                    raise
                say("waiting: " + "; ".join(f"{each.where}: {each.what}" for each in error.errors))
                time.sleep(WAIT_FOR_GPUS + random.random())  # noqa: S311 - so that two who wait do not keep in step
    except LauncherError as error:
        record.finish(
            {"run": record.run, "state": RunState.FAILED.value, "exit_code": error.exit_code, "why": str(error)}
        )
        raise
    meeting = plan.rendezvous
    say(f"{plan.run} runs on {', '.join(n.node for n in plan.nodes)}, meeting at {meeting.address}:{meeting.port}")
    return record
