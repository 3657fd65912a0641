"""Arguments and options shared by several commands, and their interpretation."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

import launcher
from launcher.api import history
from launcher.api.history import Named
from launcher.cli import completion
from launcher.cli.terminal import Reporter
from launcher.errors import RunUnknown, UsageError
from launcher.model.host import cluster_host
from launcher.records.store import job_of
from launcher.run.locate import Note

RunOrSweep = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN|SWEEP",
        autocompletion=completion.runs,
        help="A run or sweep: its ID, a unique prefix, or a job name for what started last (default: the latest).",
    ),
]
JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file.")]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        autocompletion=completion.runs,
        help="Run ID, unique prefix of one, or job name for its latest run (default: the latest run).",
    ),
]
Nodes = Annotated[
    str | None,
    typer.Option(metavar="A,B", autocompletion=completion.hosts, help="Query these nodes; no local record is needed."),
]
On = Annotated[str | None, typer.Option(metavar="CLUSTER", help="Use this cluster of the settings file.")]
NotOn = Annotated[str | None, typer.Option("--on", hidden=True)]  # refuse_cluster says what to do instead
JobNodes = Annotated[
    str | None,
    typer.Option(metavar="A,B", autocompletion=completion.hosts, help="Use these nodes instead of the job's."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job file: run.args.epochs=3"),
]
SshConfig = Annotated[
    Path | None,
    typer.Option(metavar="FILE", envvar="LAUNCHER_SSH_CONFIG", help="Use this ssh config instead of ~/.ssh/config."),
]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="RUN|GROUP|URL",
        autocompletion=completion.runs,
        help="Start with the checkpoints and files of a run or of the trainer's --mirror, or resume a sweep.",
    ),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Pass all terminal escape sequences, not only colours; for trusted output only.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def hosts(nodes: str | None, on: str | None = None) -> list[str] | None:
    """Split `a,b` into a list; None if the option was not given. on: a cluster, used instead."""
    if on is not None:
        return [cluster_host(on)]
    return None if nodes is None else [host.strip() for host in nodes.split(",") if host.strip()]


def named(
    run: str | None,
    nodes: str | None,
    on: str | None,
    ssh_config: Path | None,
    log: Note | None = None,
    *,
    to_stop: bool = False,
) -> Named:
    """Return the runs that the arguments of a command select, which may be a sweep."""
    log = log or Reporter().log
    anywhere = nodes is not None or on is not None
    found = history.named(run, to_stop=to_stop, anywhere=anywhere, nodes=hosts(nodes), ssh_config=ssh_config, log=log)
    if found.group is not None and found.group != run:
        log(f"the latest sweep is {found.group}" if run is None else f"{run} is the sweep {found.group}")
    return found


def find(
    run: str | None, nodes: str | None, on: str | None, ssh_config: Path | None, log: Note | None = None
) -> launcher.Run:
    """Return the run that the arguments of a command select. If the choice is the launcher's own, it is named."""
    log = log or Reporter().log
    found = launcher.find(run, nodes=hosts(nodes), cluster=on, ssh_config=ssh_config, log=log)
    if run is None:
        log(f"the latest run is {found.id}")
    elif run == job_of(found.id):
        log(f"the latest run of {run} is {found.id}" + ("" if found.group else history.beside(found.id)))
    elif found.group is not None and found.group.group.startswith(run):
        log(f"the latest variant of {found.group.group} is {found.id}")
    if found.group is not None and (run is None or found.group.group.startswith(run)):
        where = [*(["--nodes", nodes] if nodes else []), *(["--on", on] if on else [])]
        command = shlex.join(["launcher", "runs", found.group.group, *where])
        log(f"it is {found.group.shown}; for another variant give its run ID: {command}")
    return found


def nothing_of_sweep(group: str | None, nodes: str | None, on: str | None) -> RunUnknown:
    """Return the error for a sweep that has no run on these nodes or this cluster."""
    fix = "to select its runs by their records: omit --nodes" if on is None else "list the runs: launcher runs"
    return RunUnknown(f"sweep {group}", f"has no run on {', '.join(hosts(nodes, on) or ())}", fix)


def refuse_cluster(on: str | None, what: str, fix: str) -> None:
    """Raises UsageError if --on is given to a command that does not support clusters."""
    if on is not None:
        raise UsageError(f"--on {on}", what, fix)
