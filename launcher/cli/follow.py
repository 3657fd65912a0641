"""Along with a run until it ends: its output, what Ctrl-C does, the notice."""

from __future__ import annotations

import contextlib
import time

from launcher.cli.console import Screen
from launcher.cli.reporter import way_back
from launcher.errors import StoppedByUser
from launcher.node.connect import Fleet
from launcher.node.parallel import uninterrupted
from launcher.records.paths import NodePaths
from launcher.records.store import Record
from launcher.run.notice import Notice, Notify, give
from launcher.run.state import RunState
from launcher.run.stop import stop
from launcher.run.supervise import Supervisor
from launcher.run.watch import Source, Watch

SECOND_CTRL_C = 2.0  # seconds in which another Ctrl-C stops the run instead of leaving it


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
    screen.conclude(outcome)
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
        screen.say(way_back(record.run))
        screen.say(f"Ctrl-C again within {SECOND_CTRL_C:.0f} s stops it now")
        time.sleep(SECOND_CTRL_C)
    except KeyboardInterrupt:
        screen.say(f"stopping {record.run}; its trainer may save a checkpoint first")
        with contextlib.suppress(KeyboardInterrupt):
            uninterrupted(lambda: stop(fleet, record.run, into=record.paths.root))
        record.finish({"run": record.run, "state": RunState.STOPPED.value, "exit_code": StoppedByUser.exit_code})
        screen.say("stopped; nothing of it is left but the output folders")
        return StoppedByUser.exit_code
    return None
