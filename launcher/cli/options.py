"""Arguments and options that several commands share, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import launcher
from launcher.cli.terminal import Reporter
from launcher.errors import UsageError
from launcher.model.host import cluster_host

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file.")]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="A run id, a unique prefix of one, a job's name (its latest run); nothing: the latest run.",
    ),
]
Nodes = Annotated[str | None, typer.Option(metavar="A,B", help="Ask these nodes; no local record is needed.")]
On = Annotated[str | None, typer.Option(metavar="CLUSTER", help="On this cluster of the settings file.")]
NotOn = Annotated[str | None, typer.Option("--on", hidden=True)]  # refuse_cluster says what to do instead
JobNodes = Annotated[str | None, typer.Option(metavar="A,B", help="Run on these nodes instead.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job file: run.args.epochs=3")
]
SshConfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", envvar="LAUNCHER_SSH_CONFIG", help="Use this ssh config instead of ~/.ssh/config."),
]
Resume = Annotated[
    str | None,
    typer.Option(metavar="RUN|GROUP", help="Begin with an earlier run's newest checkpoint, or finish a sweep."),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Pass all terminal sequences of the output, not only its colours: trust it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def hosts(nodes: str | None, on: str | None = None) -> list[str] | None:
    """`a,b` as a list; None where the option was not given. on: a cluster, instead."""
    if on is not None:
        return [cluster_host(on)]
    return None if nodes is None else [host.strip() for host in nodes.split(",") if host.strip()]


def find(run: str | None, nodes: str | None, on: str | None, ssh_config: Path | None) -> launcher.Run:
    """The run that a command's arguments mean."""
    return launcher.find(run, nodes=hosts(nodes), cluster=on, ssh_config=ssh_config, log=Reporter().log)


def refuse_cluster(on: str | None, what: str, fix: str) -> None:
    """Raises UsageError where a cluster is named to a command that knows none."""
    if on is not None:
        raise UsageError(f"--on {on}", what, fix)
