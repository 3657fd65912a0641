"""A run in the foreground, for `up` and `logs`: shown until it ends, is left or is stopped."""

from __future__ import annotations

import signal
import time

from launcher import Outcome, Run
from launcher.cli.console import Screen
from launcher.errors import NodesFailed, NodeUnreachable, StoppedByUser
from launcher.run.printed import MASTER, Selection

SECOND_CTRL_C = 2.0  # seconds in which another Ctrl-C stops the run instead of leaving it


def show_until_end(run: Run, screen: Screen, selection: Selection = MASTER) -> Outcome:
    """Show a run until it ends, and how it ended. Raises KeyboardInterrupt, BrokenPipeError: the run goes on then."""
    with screen.live():
        outcome = run.wait(show=screen.show, logs=selection)
    screen.conclude(outcome)
    return outcome


def follow(run: Run, screen: Screen) -> int | None:
    """Show the master until the run ends; the exit code, None if the user left it running."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        why = "Ctrl-C is ignored, as the launcher was started in the background"
        screen.log(f"{why}. Stop the run: launcher down {run.id}")
    try:
        return show_until_end(run, screen).exit_code
    except KeyboardInterrupt:
        return leave_or_stop(run, screen)
    except BrokenPipeError:
        come_back = f"Come back: launcher logs {run.id}   stop it: launcher down {run.id}"
        screen.log(f"left {run.id} running, as nothing reads its output. {come_back}")
        raise_silent(screen, run)
        return None


def raise_silent(screen: Screen, run: Run) -> None:
    """Raises NodesFailed where nodes of a run that is being left do not answer."""
    fix = f"It may still be running there. Check with: launcher status {run.id}; stop it with: launcher down {run.id}"
    silent = screen.silent.items()
    if silent:
        raise NodesFailed([NodeUnreachable(f"node {node}", f"no answer since {since}", fix) for node, since in silent])


def leave_or_stop(run: Run, screen: Screen) -> int | None:
    """After the first Ctrl-C: leave the run going (None), unless a second one follows; then its exit code."""
    try:  # from the first line on: a person may press twice in a row
        screen.finish()
        screen.log(f"left {run.id} running. Come back: launcher logs {run.id}   stop it: launcher down {run.id}")
        screen.log(f"Ctrl-C again within {SECOND_CTRL_C:.0f} s stops it now")
        time.sleep(SECOND_CTRL_C)
        raise_silent(screen, run)
    except KeyboardInterrupt:
        return stop_now(run, screen)
    return None


def stop_now(run: Run, screen: Screen) -> int:
    """Stop it for the user; the exit code."""
    screen.log(f"stopping {run.id}; its trainer may save a checkpoint first")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a third Ctrl-C: it is being stopped already
    try:
        run.down()
    finally:
        signal.signal(signal.SIGINT, before)
    screen.log("stopped; nothing of it is left but the output folders")
    return StoppedByUser.exit_code
