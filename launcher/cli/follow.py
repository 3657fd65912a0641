"""Follow a run in the foreground, for `up` and `logs`: until it ends, is stopped, or the user detaches."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from launcher import Outcome, Run
from launcher.cli.console import Screen
from launcher.errors import NodesFailed, NodeUnreachable, StoppedByUser
from launcher.run.selection import MASTER, Selection

SECOND_CTRL_C = 2.0  # seconds in which another Ctrl-C stops the run instead of leaving it


def show_until_end(run: Run, screen: Screen, selection: Selection = MASTER) -> Outcome:
    """Show a run until it ends, and its outcome. On KeyboardInterrupt and BrokenPipeError the run continues."""
    with screen.live():
        outcome = run.wait(show=screen.show, logs=selection)
    screen.conclude(outcome, run.written())
    return outcome


def follow(run: Run, screen: Screen) -> int | None:
    """Show the output of the master until the run ends. Return the exit code, or None if the user detached."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        why = "Ctrl-C is ignored because the launcher was started in the background"
        screen.log(f"{why}. To stop the run: launcher down {run.id}")
    try:
        return show_until_end(run, screen).exit_code
    except KeyboardInterrupt:
        return has_ended(run, screen) if run.ended else leave_or_stop(run, screen)
    except BrokenPipeError:
        if run.ended:
            return has_ended(run, screen)
        screen.log(f"stdout was closed; {_detached(run, screen)}. {_next_steps(run)}")
        raise_silent(screen, run)
        return None


def has_ended(run: Run, screen: Screen) -> int | None:
    """After a Ctrl-C, or without a reader, once every container has ended: as for `follow`."""
    if run.outcome is None:
        screen.finish()
        fix = f"To see how: launcher logs {run.id}   To remove its containers: launcher down {run.id}"
        screen.log(f"interrupted; {run.id} has ended, but how was not recorded yet. {fix}")
        return None
    screen.conclude(run.outcome)
    return run.outcome.exit_code


def raise_silent(screen: Screen, run: Run) -> None:
    """Raises NodesFailed if nodes do not respond when the user detaches from a run."""
    fix = f"It may still be running there. Check with: launcher status {run.id}; stop it with: launcher down {run.id}"
    silent = screen.silent.items()
    if silent:
        raise NodesFailed([NodeUnreachable(f"node {node}", f"no answer since {since}", fix) for node, since in silent])


def leave_or_stop(run: Run, screen: Screen) -> int | None:
    """After the first Ctrl-C: detach (None), or stop the run on a second one and return the exit code."""
    try:  # from the first line on: the user may press Ctrl-C twice in a row
        screen.finish()
        screen.log(f"{_detached(run, screen)}. {_next_steps(run)}")
        screen.log(f"To stop it now, press Ctrl-C again within {SECOND_CTRL_C:.0f} s")
        time.sleep(SECOND_CTRL_C)
        raise_silent(screen, run)
    except KeyboardInterrupt:
        return stop_now(run, screen)
    return None


def _detached(run: Run, screen: Screen) -> str:
    return f"detached from {run.id}, which is still {'in the queue' if screen.first.queued else 'running'}"


def _next_steps(run: Run) -> str:
    return f"Reattach: launcher logs {run.id}   Stop: launcher down {run.id}"


def stop_now(run: Run, screen: Screen) -> int:
    """Stop the run and return the exit code."""
    screen.log(f"stopping {run.id}; the program may save a checkpoint first")
    with without_ctrl_c():
        removed = run.down()
    if written := run.written():
        screen.log(run.mask(str(written)))
    kept = " and the containers with these files" if any(node.kept for node in removed) else ""
    screen.log(f"stopped; only the output folders{kept} remain on the nodes")
    return StoppedByUser.exit_code


@contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Ignore a third Ctrl-C: the program is being stopped."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
