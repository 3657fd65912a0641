"""`launcher doctor`: check every node and suggest fixes; exit code 3 if a check fails."""

from __future__ import annotations

import json as json_
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from launcher.cli import gpus, options, terminal, wrapping
from launcher.cli.bench import show_bench
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, UsageError
from launcher.job.files import check_files
from launcher.job.loader import load_job
from launcher.job.models import Job
from launcher.job.settings import read_settings
from launcher.model.facts import NodeFacts
from launcher.model.plan import plain
from launcher.model.sizes import counted
from launcher.node.connect import connect
from launcher.planning.checks import Check, Level
from launcher.run.bench import BenchResult
from launcher.run.bench import bench as measured
from launcher.run.cluster import check_cluster
from launcher.run.doctor import check_nodes

_SIGNS = {Level.OK: "[green]ok  [/]", Level.WARN: "[yellow]warn[/]", Level.FAIL: "[bold red]FAIL[/]"}


def doctor(
    targets: Annotated[list[str], typer.Argument(metavar="JOB|NODE...", help="A job file or nodes.")],
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    bench: Annotated[
        bool,
        typer.Option("--bench", help="Measure the parts of each node in the job's image and report slow ones."),
    ] = False,
    minutes: Annotated[
        float, typer.Option(metavar="N", min=0.1, max=60.0, help="Time limit of --bench, in minutes.")
    ] = 2.0,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """With a job file, also check what the job needs: mounts, data, port,
    connections between its nodes, and whether their engines start its
    containers. On a cluster, check whether Slurm would accept the job.

    Exit codes: 0 if every check passes or only warns, 3 if a check fails or
    --bench finds a slow part. Of two parts that differ, --bench blames neither:
    that is a warning.

    Example: launcher doctor job.yaml
    """
    job = _job(targets, sets or [], options.hosts(nodes))
    if bench:  # its containers load the machines, and are removed as after a Ctrl-C
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if bench and job is None:
        raise UsageError("--bench", "needs a job file: the job's nodes are measured in the job's image")
    if on is not None and (job is None or bench):
        raise UsageError(
            f"--on {on}", "needs a job file and does not support --bench", f"launcher doctor JOB --on {on}"
        )
    named = targets if on is None else options.hosts(None, on) or ()
    hosts = job.hosts() if job and on is None else [(host, host) for host in named]
    console = terminal.console()
    seen: list[Check] = []
    with_gpus: list[NodeFacts] = []
    examined: BenchResult | None = None
    began = time.monotonic()
    with connect(hosts, job.runtime if job else "docker", ssh_config, allow_failures=True) as fleet:

        def checks() -> Iterator[Check | NodeFacts]:
            if job is None or on is None:
                yield from check_nodes(job, fleet)
            else:
                yield from check_cluster(job, read_settings(os.environ).cluster(on), fleet)

        for check in checks():
            if isinstance(check, NodeFacts):
                with_gpus.append(check)
                continue
            seen.append(check)
            if not json:
                _show(console, check)
        if bench and job is not None:
            left = max(60 * minutes - (time.monotonic() - began), 0.0)
            unfit = {check.node: f"{check.name}: {check.what}" for check in seen if check.level is Level.FAIL}
            examined = measured(job, fleet, left, unfit, Reporter().log)
    _conclude(console, seen, with_gpus, examined, json=json)


def _conclude(
    console: Console, seen: Sequence[Check], with_gpus: Sequence[NodeFacts], examined: BenchResult | None, *, json: bool
) -> None:
    """Print the rest, or everything as JSON. Raises typer.Exit."""
    count = {level: sum(check.level is level for check in seen) for level in Level}
    worst = next((level for level in reversed(Level) if count[level]), Level.OK)
    if json:
        report = {"level": worst.value, "checks": [plain(check) for check in seen], "gpus": gpus.rows(with_gpus)}
        typer.echo(json_.dumps(report | ({"bench": plain(examined)} if examined else {}), indent=2))
    else:
        if with_gpus:
            terminal.console(soft_wrap=False).print(gpus.table(with_gpus))
        warnings, failures = counted(count[Level.WARN], "warning"), counted(count[Level.FAIL], "failure")
        console.print(f"{count[Level.OK]} ok, {warnings}, {failures}")
        if examined:
            show_bench(console, examined)
    if worst is Level.FAIL or (examined and (examined.faulty or not examined.nodes)):
        raise typer.Exit(3)


def _job(targets: Sequence[str], sets: Sequence[str], nodes: list[str] | None) -> Job | None:
    """Return the job, or None if the targets are nodes."""
    if len(targets) > 1 or not (Path(targets[0]).is_file() or targets[0].endswith((".yaml", ".yml"))):
        return None
    job = load_job(Path(targets[0]), list(sets), nodes)
    try:
        check_files(job, Path.cwd(), os.environ)
    except LauncherError as error:  # the nodes are checked anyway
        Reporter().warn(str(error))
    return job


def _show(console: Console, check: Check) -> None:
    """Print a check: one line in a pipe, wrapped to the width of a terminal."""

    def cut(text: str, margin: int) -> list[str]:
        if not console.is_terminal:
            return [escape(text)]
        found = wrapping.lines(text, console.width - margin)
        return [escape(" " * line.indent + text[line.start : line.end]) for line in found]

    what = [f"{check.node:12} {check.name:18} {check.what}"]
    if console.is_terminal:
        what = wrap(what[0], console.width - 5, subsequent_indent=" " * 13)
    first, *more = map(escape, what)
    console.print("\n".join([f"{_SIGNS[check.level]} {first}", *(f"{'':5}{line}" for line in more)]))
    for line in cut(f"-> {check.fix}", 15) if check.fix else ():
        console.print(f"{'':{15 if console.is_terminal else 18}}{line}")
