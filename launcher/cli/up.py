"""`launcher up`: from the job file to a running job, and along with it until it ends or the user leaves."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import options
from launcher.cli.bars import bars
from launcher.cli.screen import Screen, print_outcome
from launcher.errors import StoppedByUser
from launcher.job.dump import dump_job
from launcher.job.files import check_files, code_folder, read_secrets
from launcher.job.loader import load_job
from launcher.job.models import Job
from launcher.job.sweep import expand_sweep
from launcher.logs.lines import Masker
from launcher.node.connect import Fleet, connect
from launcher.records.paths import NodePaths
from launcher.records.snapshot import Snapshot, snapshot
from launcher.records.store import Record
from launcher.run.prepare import prepare
from launcher.run.start import start
from launcher.run.state import RunState
from launcher.run.stop import stop
from launcher.run.supervise import Supervisor
from launcher.run.watch import Source, Watch

SECOND_CTRL_C = 2.0  # seconds in which another Ctrl-C stops the run instead of leaving it


def up(
    job: options.JobFile,
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Start it and return; `launcher logs` follows.")
    ] = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Ctrl-C leaves the run going and says how to come back; a second one stops it.

    Exit codes: 0 done or detached, 1 the job failed, 2 the job file is wrong, 3 a node is unreachable or unfit,
    4 the image, 5 stopped, 6 not every node confirmed.
    """
    loaded = load_job(job, sets or [], options.hosts(nodes))
    code = 0
    for variant in expand_sweep(loaded):
        code = max(code, run_one(variant, detach=detach, ssh_config=ssh_config))
    sys.exit(code)


def run_one(job: Job, *, detach: bool, ssh_config: Path | None) -> int:
    """One run of one job; its exit code."""
    check_files(job, Path.cwd(), os.environ)
    secrets = read_secrets(job, Path.cwd(), os.environ)
    with Screen(Masker(secrets.values())) as screen:
        code = snapshot(code_folder(job, Path.cwd()))
        with connect([(entry.name, entry.host) for entry in job.nodes], job.runtime, ssh_config) as fleet:
            record = launch(job, fleet, code, secrets, screen)
            if detach:
                screen.say(f"{record.run} is running. Follow it: launcher logs {record.run}")
                return 0
            return follow(record, fleet, screen)


def launch(job: Job, fleet: Fleet, code: Snapshot, secrets: dict[str, str], screen: Screen) -> Record:
    """Image, plan, record, start; a record of a run that never started is removed again."""
    with bars() as tell:
        plan = prepare(job, fleet, code.digest, screen.say, tell)
    for warning in plan.warnings:
        screen.say(f"warning: {warning}")
    record = Record.create(plan, dump_job(job), code.archive)
    start(plan, fleet, code.archive, secrets, record.event)
    meeting = plan.rendezvous
    screen.say(
        f"{plan.run} runs on {', '.join(n.node for n in plan.nodes)}, meeting at {meeting.address}:{meeting.port}"
    )
    return record


def follow(record: Record, fleet: Fleet, screen: Screen, offset: int = 0) -> int:
    """Along with a run until it ends; the exit code."""
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
    print_outcome(screen.err, outcome)
    if outcome.state is not RunState.DONE:
        # All that they knew has been read and written down: nothing is left on the nodes but the output folders.
        stop(fleet, record.run)
    return outcome.state.exit_code


def leave_or_stop(record: Record, fleet: Fleet, watch: Watch, screen: Screen) -> int:
    """After the first Ctrl-C: leave the run going, unless a second one follows."""
    watch.close()
    screen.finish()
    screen.say(
        f"left {record.run} running. Come back: launcher logs {record.run}   stop it: launcher down {record.run}"
    )
    screen.say(f"Ctrl-C again within {SECOND_CTRL_C:.0f} s stops it now")
    try:
        time.sleep(SECOND_CTRL_C)
    except KeyboardInterrupt:
        screen.say(f"stopping {record.run}; its trainer may save a checkpoint first")
        stopping = threading.Thread(target=stop, args=(fleet, record.run), daemon=True)
        stopping.start()
        stopping.join()
        record.finish({"run": record.run, "state": RunState.STOPPED.value, "exit_code": StoppedByUser.exit_code})
        screen.say("stopped; nothing of it is left but the output folders")
        return StoppedByUser.exit_code
    return 0
