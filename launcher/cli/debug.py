"""`launcher debug`: the terminal of ranks that wait in breakpoint()."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from launcher.cli import options


def debug(
    run: options.Run = None,
    rank: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only this rank.")] = None,
    nodes: options.Nodes = None,
    on: options.On = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """A rank that calls breakpoint() waits for this command, at most 10 minutes,
    and then goes on. Several ranks are served one after another.

    The commands are those of pdb: `c` lets the rank go on, `q` ends it, and
    Ctrl-D leaves it waiting.

    Example: launcher debug imagenet --rank 3
    """
    with options.find(run, nodes, on, ssh_config) as found:
        code = found.debug(rank=rank)
    sys.exit(code)
