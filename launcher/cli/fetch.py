"""`launcher fetch`: download the files of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import options, terminal
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NodesFailed, RunUnknown


def fetch(
    run: options.RunOrSweep = None,
    dest: Annotated[
        Path | None,
        typer.Argument(help="Destination folder (default: runs/<run id>); a folder per run of a sweep is made in it."),
    ] = None,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Also download checkpoints and what the program wrote elsewhere.")
    ] = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Files of every node are downloaded, metrics included. Only new data is
    transferred.

    Example: launcher fetch imagenet --checkpoints
    """
    named = options.named(run, nodes, on, ssh_config)
    done, failed = list[dict[str, object]](), list[LauncherError]()
    for one in named.runs:
        try:
            with options.find(one, nodes, on, ssh_config) as found:
                target = dest / found.id if dest is not None and named.group is not None else dest
                fetched = found.fetch(target, checkpoints=checkpoints)
                written = None if checkpoints else found.written()
        except RunUnknown:
            if named.group is None:
                raise
            continue  # a variant that has nothing on these nodes
        failed += fetched.failed
        shown = {"run": found.id, "folder": str(fetched.shown), "bytes": fetched.bytes, "deleted": fetched.gone}
        done.append(shown)
        for problem in fetched.problems:
            Reporter().warn(problem)
        if not json:
            variant = f" ({found.group.shown})" if found.group else ""
            what = f"downloaded {fetched.bytes:,} bytes to {fetched.shown}/"
            terminal.say(f"{found.id}{variant}: {'; '.join(fetched.gone) or what}")
            for command in fetched.trackers():
                terminal.say(f"  experiment tracker: {command}")
            if written is not None:
                Reporter().log(found.mask(str(written)))
    if not done:
        raise options.nothing_of_sweep(named.group, nodes, on)
    if json:
        terminal.say_json(done if named.group is not None else done[0])
    if failed:
        raise NodesFailed(failed)
