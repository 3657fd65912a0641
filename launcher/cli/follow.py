"""A run followed to its end on the screen, by `up` and by `logs`: output, outcome, notice."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from launcher.cli.console import Screen
from launcher.cli.reporter import way_back
from launcher.errors import StoppedByUser
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import uninterrupted
from launcher.records.store import NodeOfRun, Record
from launcher.run.finish import Outcome
from launcher.run.follow import Follow, Followed
from launcher.run.notice import Notice, Notify, give
from launcher.run.state import RunState
from launcher.run.stop import stop
from launcher.run.supervise import Supervisor

SECOND_CTRL_C = 2.0  # seconds in which another Ctrl-C stops the run instead of leaving it


def follow(
    record: Record,
    engines: Mapping[str, Engine],
    nodes: Sequence[NodeOfRun],
    shown: Sequence[Followed],
    screen: Screen,
    notify: Notify,
    *,
    resumed: bool,
) -> Outcome:
    """Show a run until it ends, and how it ended. Raises KeyboardInterrupt: the run goes on then.

    engines: by the node's name in the run. resumed: it was started before.
    """
    following = Follow(engines, nodes, shown, record.paths, resumed=resumed)
    try:
        with screen.live():
            outcome = Supervisor(engines, record, nodes, following, screen.show).supervise()
    finally:
        following.close()
    screen.conclude(outcome)
    for problem in give(notify, Notice.of(outcome)):
        screen.say(f"warning: no notice was given: {problem}")
    return outcome


def leave_or_stop(record: Record, fleet: Fleet, screen: Screen) -> int | None:
    """After the first Ctrl-C: leave the run going (None), unless a second one follows; then its exit code."""
    try:  # from the first line on: a person may press twice in a row
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
