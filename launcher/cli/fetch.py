"""`launcher fetch`: download the files of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launcher.cli import options, terminal
from launcher.cli.terminal import Reporter
from launcher.errors import NodesFailed


def fetch(
    run: options.Run = None,
    dest: Annotated[Path | None, typer.Argument(help="Destination folder (default: runs/<run id>).")] = None,
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
    with options.find(run, nodes, on, ssh_config) as found:
        fetched = found.fetch(dest, checkpoints=checkpoints)
        written = None if checkpoints else found.written()
    for problem in fetched.problems:
        Reporter().warn(problem)
    if json:
        shown = {"run": found.id, "folder": str(fetched.shown), "bytes": fetched.bytes, "deleted": fetched.gone}
        terminal.say_json(shown)
    else:
        done = f"downloaded {fetched.bytes:,} bytes to {fetched.shown}/"
        terminal.say(f"{found.id}: {'; '.join(fetched.gone) or done}")
        for command in fetched.trackers():
            terminal.say(f"  experiment tracker: {command}")
        if written is not None:
            Reporter().log(found.mask(str(written)))
    if fetched.failed:
        raise NodesFailed(fetched.failed)
