"""A run from connected nodes to its end: image, plan, start, output, what Ctrl-C does."""

from __future__ import annotations

import contextlib
import os
import random
import time

from launcher.cli.bars import bars
from launcher.cli.options import Wishes
from launcher.cli.screen import Screen, print_outcome
from launcher.errors import GpuInUse, LauncherError, NodesFailed, StoppedByUser
from launcher.image.lock import path_beside
from launcher.job.dump import dump_job
from launcher.job.models import Job
from launcher.logs.lines import Masker
from launcher.node.connect import Fleet
from launcher.node.parallel import to_the_end
from launcher.records.groups import GROUPED
from launcher.records.paths import NodePaths
from launcher.records.snapshot import Snapshot
from launcher.records.store import Record
from launcher.run.notice import Notice, Notify, give, read_settings, settings_file
from launcher.run.prepare import prepare
from launcher.run.start import start
from launcher.run.state import RunState
from launcher.run.stop import stop
from launcher.run.supervise import Supervisor
from launcher.run.watch import Source, Watch

WAIT_FOR_GPUS = 3.0  # seconds between two tries
SECOND_CTRL_C = 2.0  # seconds in which another Ctrl-C stops the run instead of leaving it


def attend(job: Job, fleet: Fleet, code: Snapshot, secrets: dict[str, str], wishes: Wishes) -> int | None:
    """Start the run and go along with it; the exit code, None where it was left running."""
    notify = read_settings(settings_file(os.environ)).notify
    with Screen(Masker(secrets.values())) as screen:
        record = launch(job, fleet, code, secrets, screen, wishes)
        if wishes.detach:
            screen.say(f"{record.run} is running. Follow it: launcher logs {record.run}")
            return None
        return follow(record, fleet, screen, notify)


def launch(job: Job, fleet: Fleet, code: Snapshot, secrets: dict[str, str], screen: Screen, wishes: Wishes) -> Record:
    """Image, plan, record, start; the record of a run that never started says why."""
    with bars() as tell:
        pin = None if wishes.file is None else path_beside(wishes.file)
        plan = prepare(job, fleet, code.digest, screen.say, tell, lock_file=pin)
    for warning in plan.warnings:
        screen.say(f"warning: {warning}")
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
                screen.say("waiting: " + "; ".join(f"{each.where}: {each.what}" for each in error.errors))
                time.sleep(WAIT_FOR_GPUS + random.random())  # noqa: S311 - so that two who wait do not keep in step
    except LauncherError as error:
        record.finish(
            {"run": record.run, "state": RunState.FAILED.value, "exit_code": error.exit_code, "why": str(error)}
        )
        raise
    meeting = plan.rendezvous
    screen.say(
        f"{plan.run} runs on {', '.join(n.node for n in plan.nodes)}, meeting at {meeting.address}:{meeting.port}"
    )
    return record


def follow(record: Record, fleet: Fleet, screen: Screen, notify: Notify, offset: int = 0) -> int | None:
    """Along with a run until it ends; the exit code, None where it was left running."""
    nodes = record.nodes()
    engines = {engine.node: engine for engine in fleet.engines}
    master = nodes[0]
    watch = Watch(engines, nodes, [Source(master, NodePaths(master.output, master.name).log, offset)], record.paths)
    supervisor = Supervisor(engines, record, nodes, watch, screen.show)
    try:
        with screen.live():
            outcome = supervisor.attend()
    except KeyboardInterrupt:
        return leave_or_stop(record, fleet, watch, screen)
    screen.finish(failed=outcome.failure is not None)
    print_outcome(screen.err, outcome, screen.mask)
    if outcome.state is not RunState.DONE:
        # All that they knew has been read and written down: nothing is left on the nodes but the output folders.
        stop(fleet, record.run)
    for problem in give(notify, Notice.of(outcome)):
        screen.say(f"warning: no notice was given: {problem}")
    return outcome.state.exit_code


def leave_or_stop(record: Record, fleet: Fleet, watch: Watch, screen: Screen) -> int | None:
    """After the first Ctrl-C: leave the run going, unless a second one follows; then its exit code."""
    try:  # from the first line on: a person may press twice in a row
        watch.close()
        screen.finish()
        screen.say(
            f"left {record.run} running. Come back: launcher logs {record.run}   stop it: launcher down {record.run}"
        )
        screen.say(f"Ctrl-C again within {SECOND_CTRL_C:.0f} s stops it now")
        time.sleep(SECOND_CTRL_C)
    except KeyboardInterrupt:
        screen.say(f"stopping {record.run}; its trainer may save a checkpoint first")
        with contextlib.suppress(KeyboardInterrupt):
            to_the_end(lambda: stop(fleet, record.run, into=record.paths.root))
        record.finish({"run": record.run, "state": RunState.STOPPED.value, "exit_code": StoppedByUser.exit_code})
        screen.say("stopped; nothing of it is left but the output folders")
        return StoppedByUser.exit_code
    return None
