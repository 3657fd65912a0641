"""`launcher doctor`: check every node and suggest fixes; exit code 3 if a check fails."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from launcher.api.doctor import Fleet, examine, job_to_check
from launcher.cli import completion, gpus, options, terminal, wrapping
from launcher.errors import UsageError
from launcher.job.models import Job
from launcher.model.facts import NodeFacts
from launcher.model.plan import plain
from launcher.model.sizes import counted
from launcher.planning.checks import Check, Level

_SIGNS = {Level.OK: "[green]ok  [/]", Level.WARN: "[yellow]warn[/]", Level.FAIL: "[bold red]FAIL[/]"}


@dataclass(frozen=True)
class Examined:
    """What a feature found out after the checks. report: under `key` of --json; failed: doctor's exit code is 3."""

    key: str
    report: Any
    failed: bool
    show: Callable[[Console], None]


# Called with the connected nodes, and why some failed their checks. Raises LauncherError.
Examination: TypeAlias = Callable[[Fleet, Mapping[str, str]], Examined]
# Called with the job and the cluster before anything is contacted; None: its option was not given. Raises UsageError.
Option: TypeAlias = Callable[[Job | None, str | None], Examination | None]


def doctor(
    targets: Annotated[
        list[str],
        # without such an alias, the shell completes files
        typer.Argument(metavar="JOB|NODE...", autocompletion=completion.hosts, help="A job file or nodes."),
    ],
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
    *,
    added: Sequence[Option] = (),
) -> None:
    """With a job file, also check what the job needs: mounts, data, port,
    connections between its nodes, and whether their engines start its
    containers. On a cluster, check whether Slurm would accept the job.

    Exit codes: 0 if every check passes or only warns, 3 if a check fails.

    Example: launcher doctor job.yaml
    """
    job, problems = _job(targets, sets or [], options.hosts(nodes))
    examinations = [examination for option in added if (examination := option(job, on)) is not None]
    if on is not None and job is None:
        raise UsageError(f"--on {on}", "needs a job file", f"launcher doctor JOB --on {on}")
    console = terminal.console()
    seen: list[Check] = []
    with_gpus: list[NodeFacts] = []
    with examine(job, targets, cluster=on, ssh_config=ssh_config) as found:
        for check in (*problems, *found.checks):
            if isinstance(check, NodeFacts):
                with_gpus.append(check)
                continue
            seen.append(check)
            if not json:
                _show(console, check)
        unfit = {check.node: f"{check.name}: {check.what}" for check in seen if check.level is Level.FAIL}
        examined = [examination(found.fleet, unfit) for examination in examinations]
    _conclude(console, seen, with_gpus, examined, json=json)


def _conclude(
    console: Console, seen: Sequence[Check], with_gpus: Sequence[NodeFacts], examined: Sequence[Examined], *, json: bool
) -> None:
    """Print the rest, or everything as JSON. Raises typer.Exit."""
    count = {level: sum(check.level is level for check in seen) for level in Level}
    worst = next((level for level in reversed(Level) if count[level]), Level.OK)
    if json:
        report = {"level": worst.value, "checks": [plain(check) for check in seen], "gpus": gpus.rows(with_gpus)}
        terminal.say_json(report | {each.key: each.report for each in examined})
    else:
        if with_gpus:
            terminal.table_console().print(gpus.table(with_gpus))
        warnings, failures = counted(count[Level.WARN], "warning"), counted(count[Level.FAIL], "failure")
        console.print(f"{count[Level.OK]} ok, {warnings}, {failures}")
        for each in examined:
            each.show(console)
    if worst is Level.FAIL or any(each.failed for each in examined):
        raise typer.Exit(3)


def _job(targets: Sequence[str], sets: Sequence[str], nodes: list[str] | None) -> tuple[Job | None, Sequence[Check]]:
    """Return the job, or None if the targets are nodes; and what it lacks on this machine. Raises UsageError."""
    files = [target for target in targets if target.endswith((".yaml", ".yml"))]
    if files and len(targets) > 1:
        what = f"expected one job file or nodes, got {' '.join(targets)}"
        others = [target for target in targets if target not in files]
        instead = f" --nodes {shlex.quote(','.join(others))}" if others else ""
        raise UsageError("doctor", what, f"for one job: launcher doctor {shlex.quote(files[0])}{instead}")
    if not files and (len(targets) > 1 or not Path(targets[0]).is_file()):
        return None, ()
    return job_to_check(Path(targets[0]), sets, nodes)


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
