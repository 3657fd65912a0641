"""`launcher logs`: show the output of the master, of a node or of a rank, and follow it until the run ends."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from typing import Annotated

import typer

import launcher
from launcher.cli import options
from launcher.cli.console import Screen
from launcher.cli.follow import has_ended, raise_silent, show_until_end
from launcher.run.selection import Selection


def logs(
    run: options.Run = None,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", "-f/-F", help="Follow until the run ends.")] = True,
    rank: Annotated[int | None, typer.Option(metavar="N", help="Show the output of this global rank.")] = None,
    node: Annotated[str | None, typer.Option(help="Show the output of this node.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Show the output of all nodes, prefixed with the node.")] = False,
    tail: Annotated[int | None, typer.Option(metavar="N", min=0, help="Start with the last N lines.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="T", help="Start at this time: 10m (ago) or 2026-01-31T12:00.")
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", "-t", help="Show the time of each line; do not follow.")
    ] = False,
    raw: options.Raw = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """By default, show the output of the master. Each line is shown once, even if
    the connection is interrupted. Ctrl-C detaches; the run continues.

    Exit code, if the run was followed to its end: that of the run. Of a run that
    was not started, the reason is shown; the exit code is that of its `up`.

    Example: launcher logs imagenet --rank 3 --tail 100
    """
    selection = Selection(rank, node, all_, tail, since)
    with ExitStack() as stack:
        found = stack.enter_context(options.find(run, nodes, on, ssh_config))
        screen = stack.enter_context(Screen(found.mask, prefix=all_ and len(found.nodes) > 1, raw=raw))
        if found.unmasked:
            screen.warn(found.unmasked)
        ended = found.outcome
        if follow and not timestamps and ended is None and found.containers():
            sys.exit(_follow(found, screen, selection))
        with suppress(BrokenPipeError):  # `| head` has exited
            for output in found.output(selection, timestamps=timestamps):
                screen.show(output)
        if (why := found.not_started) is not None:
            screen.finish()
            raise why
        if follow and ended is None and (states := found.containers().values()):  # with --timestamps
            if all(state.phase.ended for state in states):
                ended = found.wait()
            else:
                screen.log(f"the run goes on, and with --timestamps is not followed: launcher logs {found.id}")
        if follow and ended is not None:
            screen.conclude(ended)
            sys.exit(ended.exit_code)


def _follow(run: launcher.Run, screen: Screen, selection: Selection) -> int:
    try:
        return show_until_end(run, screen, selection).exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        if run.ended:
            return has_ended(run, screen) or 0
        screen.log(f"detached from {run.id}. To see its state: launcher status {run.id}")
        raise_silent(screen, run)
        return 0
