"""A run in the foreground, for `up` and `logs`: shown until it ends, is left or is stopped."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.cli.console import Screen
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NodesFailed, NodeUnreachable, RunUnknown, StoppedByUser
from launcher.job.settings import read_settings
from launcher.model.plan import RunId
from launcher.node import output_folder
from launcher.node.parallel import in_background, uninterrupted
from launcher.records.paths import NodePaths
from launcher.run.finish import Outcome, supervise
from launcher.run.followed import Followed
from launcher.run.locate import Attached, attach
from launcher.run.notify import Notice, send
from launcher.run.state import RunState
from launcher.run.stop import stop

SECOND_CTRL_C = 2.0  # seconds in which another Ctrl-C stops the run instead of leaving it


def show_until_end(attached: Attached, shown: Sequence[Followed], screen: Screen, *, resumed: bool) -> Outcome:
    """Show a run until it ends, and how it ended. Raises KeyboardInterrupt: the run goes on then.

    resumed: it was started before.
    """
    in_background(lambda: importlib.import_module("rich.console"))  # while the run goes on: its end shall not wait
    notify = read_settings(os.environ).notify  # of the start: the file may be edited meanwhile
    with screen.live():
        outcome = supervise(attached, shown, screen.show, resumed=resumed)
    screen.conclude(outcome)
    why = "" if outcome.failure is None else f": {outcome.failure.node} {outcome.failure.what}"
    why = why if outcome.stopped_by is None else f" by {outcome.stopped_by}"
    state = outcome.state
    for problem in send(notify, Notice(outcome.run, state.value, state.exit_code, f"{outcome.run} {state.value}{why}")):
        screen.warn(f"no notice was given: {problem}")
    return outcome


def follow(attached: Attached, screen: Screen, *, resumed: bool) -> int | None:
    """Show the master until the run ends; the exit code, None where it is left. A failed run is removed there."""
    master, record = attached.nodes[0], attached.record
    try:
        shown = Followed(master, NodePaths(master.output, master.name).log, moves=record.min_nodes > 0)
        outcome = show_until_end(attached, [shown], screen, resumed=resumed)
    except KeyboardInterrupt:
        return leave_or_stop(attached, screen)
    if outcome.state not in (RunState.DONE, RunState.STOPPED):  # who stopped it elsewhere removes it too
        # All evidence has been read and recorded: nothing is left on the nodes but the output folders.
        try:
            stop(attached.fleet, record.run)
        except NodesFailed as left:
            screen.warn(f"something may be left there; when it is back: launcher down {record.run}\n{left}")
    return outcome.state.exit_code


def raise_silent(screen: Screen, run: RunId) -> None:
    """Raises NodesFailed where nodes of a run that is being left do not answer."""
    cure = f"it may well go on there: launcher status {run}; or, if it is gone: launcher down {run}"
    silent = screen.silent.items()
    if silent:
        raise NodesFailed([NodeUnreachable(f"node {node}", f"no answer since {since}", cure) for node, since in silent])


def leave_or_stop(attached: Attached, screen: Screen) -> int | None:
    """After the first Ctrl-C: leave the run going (None), unless a second one follows; then its exit code."""
    run = attached.record.run
    try:  # from the first line on: a person may press twice in a row
        screen.finish()
        screen.log(f"left {run} running. Come back: launcher logs {run}   stop it: launcher down {run}")
        screen.log(f"Ctrl-C again within {SECOND_CTRL_C:.0f} s stops it now")
        time.sleep(SECOND_CTRL_C)
        raise_silent(screen, run)
    except KeyboardInterrupt:
        return stop_now(attached, screen)
    return None


def stop_now(attached: Attached, screen: Screen) -> int:
    """Stop it for the user; the exit code."""
    record = attached.record
    screen.log(f"stopping {record.run}; its trainer may save a checkpoint first")
    with contextlib.suppress(KeyboardInterrupt):
        uninterrupted(lambda: stop(attached.fleet, record.run, into=record, warn=screen.warn))
    if problem := record.finish({"state": RunState.STOPPED, "exit_code": StoppedByUser.exit_code}):
        screen.warn(problem)
    screen.log("stopped; nothing of it is left but the output folders")
    return StoppedByUser.exit_code


def show_array(runs: Sequence[RunId], ssh_config: Path | None, *, raw: bool) -> int:
    """A sweep on a cluster is one job array: show its variants, all submitted, one after another until each ends.

    The worst exit code. Leaving one leaves all, stopping one stops the rest.
    """
    code, log = 0, Reporter().log
    for run in runs:
        with attach(run, None, ssh_config, log) as attached, Screen(attached.record.mask, raw=raw) as screen:
            if code == StoppedByUser.exit_code:
                stop_now(attached, screen)
                continue
            ended = follow(attached, screen, resumed=True)
        if ended is None:
            log("the other variants go on as well: launcher runs")
            return 0
        code = max(code, ended)
    return code


def undo_array(runs: Sequence[RunId], cause: BaseException, ssh_config: Path | None) -> None:
    """Remove the variants of an array that was not submitted, as far as they were created."""
    code = cause.exit_code if isinstance(cause, LauncherError) else StoppedByUser.exit_code
    for run in runs:
        with contextlib.suppress(RunUnknown), attach(run, None, ssh_config, Reporter().log) as attached:
            stop(attached.fleet, run)
            master = attached.nodes[0]
            output_folder.remove(attached.engines[master.name].files, master.output, run)
            attached.record.finish({"state": RunState.FAILED, "exit_code": code, "why": str(cause)})
