"""A run in the foreground, for `up` and `logs`: shown until it ends, is left or is stopped."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Sequence

from launcher.cli.console import Screen
from launcher.errors import NodesFailed, NodeUnreachable, StoppedByUser
from launcher.job.settings import Notify
from launcher.model.plan import RunId
from launcher.node.parallel import in_background, uninterrupted
from launcher.records.paths import NodePaths
from launcher.run.finish import Outcome, supervise
from launcher.run.followed import Followed
from launcher.run.locate import Attached
from launcher.run.notify import Notice, send
from launcher.run.state import RunState
from launcher.run.stop import stop

SECOND_CTRL_C = 2.0  # seconds in which another Ctrl-C stops the run instead of leaving it


def show_until_end(
    attached: Attached, shown: Sequence[Followed], screen: Screen, notify: Notify, *, resumed: bool
) -> Outcome:
    """Show a run until it ends, and how it ended. Raises KeyboardInterrupt: the run goes on then.

    resumed: it was started before.
    """
    in_background(lambda: importlib.import_module("rich.console"))  # while the run goes on: its end shall not wait
    with screen.live():
        outcome = supervise(attached, shown, screen.show, resumed=resumed)
    screen.conclude(outcome)
    why = "" if outcome.failure is None else f": {outcome.failure.node} {outcome.failure.what}"
    why = why if outcome.stopped_by is None else f" by {outcome.stopped_by}"
    state = outcome.state
    for problem in send(notify, Notice(outcome.run, state.value, state.exit_code, f"{outcome.run} {state.value}{why}")):
        screen.warn(f"no notice was given: {problem}")
    return outcome


def follow(attached: Attached, screen: Screen, notify: Notify, *, resumed: bool, moves: bool = False) -> int | None:
    """Show the master until the run ends; the exit code, None where it is left. A failed run is removed there."""
    master = attached.nodes[0]
    try:
        shown = [Followed(master, NodePaths(master.output, master.name).log, moves=moves)]
        outcome = show_until_end(attached, shown, screen, notify, resumed=resumed)
    except KeyboardInterrupt:
        return leave_or_stop(attached, screen)
    run = attached.record.run
    if outcome.state not in (RunState.DONE, RunState.STOPPED):  # who stopped it elsewhere removes it too
        # All evidence has been read and recorded: nothing is left on the nodes but the output folders.
        try:
            stop(attached.fleet, run)
        except NodesFailed as left:
            screen.warn(f"something may be left there; when it is back: launcher down {run}\n{left}")
    return outcome.state.exit_code


def raise_silent(screen: Screen, run: RunId) -> None:
    """Raises NodesFailed where nodes of a run that is being left do not answer."""
    what, cure = (
        "no answer since",
        f"it may well go on there: launcher status {run}; or, if it is gone: launcher down {run}",
    )
    silent = [NodeUnreachable(f"node {node}", f"{what} {since}", cure) for node, since in screen.silent.items()]
    if silent:
        raise NodesFailed(silent)


def leave_or_stop(attached: Attached, screen: Screen) -> int | None:
    """After the first Ctrl-C: leave the run going (None), unless a second one follows; then its exit code."""
    record = attached.record
    try:  # from the first line on: a person may press twice in a row
        screen.finish()
        screen.log(
            f"left {record.run} running. Come back: launcher logs {record.run}   stop it: launcher down {record.run}"
        )
        screen.log(f"Ctrl-C again within {SECOND_CTRL_C:.0f} s stops it now")
        time.sleep(SECOND_CTRL_C)
        raise_silent(screen, record.run)
    except KeyboardInterrupt:
        return stop_now(attached, screen)
    return None


def stop_now(attached: Attached, screen: Screen) -> int:
    """Stop it for the user; the exit code."""
    record = attached.record
    screen.log(f"stopping {record.run}; its trainer may save a checkpoint first")
    with contextlib.suppress(KeyboardInterrupt):
        uninterrupted(lambda: stop(attached.fleet, record.run, into=record, warn=screen.warn))
    stopped = {"run": record.run, "state": RunState.STOPPED.value, "exit_code": StoppedByUser.exit_code}
    if problem := record.finish(stopped):
        screen.warn(problem)
    screen.log("stopped; nothing of it is left but the output folders")
    return StoppedByUser.exit_code
