"""`launcher down`: stop a run and remove its containers from every node."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

import launcher
from launcher.api.history import maybe_running, sweeps_that_go_on
from launcher.api.run import runs_to_stop
from launcher.cli import options, terminal
from launcher.cli.terminal import Reporter
from launcher.errors import LauncherError, NotConfirmed, RunUnknown, UsageError
from launcher.job.settings import use_valid_settings
from launcher.model import labels
from launcher.model.sizes import counted
from launcher.run.end.stop import EndedContainer, Removed, not_confirmed
from launcher.run.locate import Note

if TYPE_CHECKING:
    from launcher.records.written import Written


def down(
    run: options.Run = None,
    all_: Annotated[bool, typer.Option("--all", help="Stop all runs that were started in this folder.")] = False,
    all_projects: Annotated[
        bool, typer.Option("--all-projects", help="Also runs that other folders started: --nodes, or recorded here.")
    ] = False,
    purge: Annotated[bool, typer.Option("--purge", help="Also delete the output folders on the nodes.")] = False,
    unfetched: Annotated[
        bool,
        typer.Option(
            "--unfetched",
            help="Also delete what has files that were not fetched: containers, and output folders with --purge.",
        ),
    ] = False,
    any_owner: Annotated[bool, typer.Option("--any-owner", help="Also stop the run of another user.")] = False,
    nodes: options.Nodes = None,
    on: options.On = None,
    json: options.Json = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Fetch logs and TensorBoard logs, send SIGTERM, wait 45 s for a checkpoint,
    then send SIGKILL. The command can be repeated safely.

    Runs of other users are not stopped, nor are runs that the same account
    started from another machine, unless they are named. Exit code 6 if a node
    did not confirm or was left out of --nodes: run the same command again to
    finish. RUN may also be the ID of a sweep, or a unique prefix.

    Without --unfetched, a container with files outside of its output folder, and
    with --purge an output folder, that were not fetched, is kept and named, with
    exit code 0: launcher fetch RUN --checkpoints. Its GPUs and port are free.

    Example: launcher down imagenet
    """
    report = Reporter()
    use_valid_settings(os.environ, report.warn)
    log = cache(report.log)  # each note once, for any number of runs
    all_ = all_ or all_projects
    if all_ and run is not None:
        raise UsageError("--all", f"stops every run, but {run} is named", "omit one of them")
    names: Sequence[str | None]
    group: str | None = None  # of a sweep
    errors: list[LauncherError] = []
    if all_:
        names, errors = _selected(all_projects, purge, nodes, on, ssh_config, log)
    else:
        named = options.named(run, nodes, on, ssh_config, log, to_stop=True)
        names, group = named.runs, named.group
    stopped, missing = list[_Stopped](), 0
    for index, name in enumerate(names):
        left = [name or "the run", *(str(other) for other in names[index + 1 :])]
        try:
            with options.find(name, nodes, on, ssh_config, log) as found:
                left[0] = f"{found.id} on {', '.join(found.nodes)}"
                own_only = all_ or name is None
                one = _stop(found, purge=purge, unfetched=unfetched, any_owner=any_owner, own_only=own_only)
        except KeyboardInterrupt:
            raise _interrupted(left) from None
        except LauncherError as error:
            if not all_ and group is None:
                raise
            if isinstance(error, RunUnknown):  # a variant that has nothing on these nodes, or not any more
                missing += 1
            elif isinstance(error, UsageError):  # another user's run
                log(f"skipped: {error}")
            else:  # the other runs are stopped anyway
                errors.append(error)
            continue
        stopped.append(one)
        errors += one.failed
        if not json:
            _print(report, one, purge=purge)
    if missing and missing == len(names) and not all_:
        raise options.nothing_of_sweep(group or run, nodes, on)
    if json:
        terminal.say_json([one.as_json() for one in stopped])
    if not all_ and nodes is None and on is None:
        _name_others({one.run.id for one in stopped}, run, report, ssh_config)
    if errors:
        raise not_confirmed((), errors)


@dataclass(frozen=True)
class _Stopped:
    """A run of which the nodes were asked to remove all. failed: the errors of those that did not confirm.

    written: what its program wrote and nobody has fetched.
    """

    run: launcher.Run
    removed: Sequence[Removed]
    failed: Sequence[LauncherError]
    written: Written | None

    def as_json(self) -> dict[str, object]:
        return {
            "run": self.run.id,
            "nodes": [_as_json(each) for each in self.removed],
            "failed": [str(error) for error in self.failed],
            "written": None if self.written is None else asdict(self.written),
        }


def _stop(run: launcher.Run, *, purge: bool, unfetched: bool, any_owner: bool, own_only: bool) -> _Stopped:
    failed: Sequence[LauncherError] = ()
    try:
        removed: Sequence[Removed] = run.down(purge=purge, unfetched=unfetched, any_owner=any_owner, own_only=own_only)
    except NotConfirmed as error:
        removed, failed = error.removed, error.errors
    return _Stopped(run, removed, failed, None if purge or failed else run.written())


def _selected(
    all_projects: bool, purge: bool, nodes: str | None, on: str | None, ssh_config: Path | None, log: Note
) -> tuple[list[str | None], list[LauncherError]]:
    """Return the runs of `down --all`, and the errors of nodes that may have more."""
    found = runs_to_stop(nodes=options.hosts(nodes), cluster=on, purge=purge, ssh_config=ssh_config, log=log)
    where = shlex.join([*(["--nodes", nodes] if nodes else []), *(["--on", on] if on else [])])
    runs = [*found.runs, *(found.foreign if all_projects else ())]
    for name in () if all_projects else found.foreign:
        fix = f"to stop it, run: launcher down {name} {where}".rstrip()
        log(f"skipped: {name} was not started in this folder; {fix}; all such runs: --all-projects")
    if found.skipped:
        what = "nothing" if purge else "no container"  # without --purge, output folders stay
        log(f"{what} is left on the nodes of {counted(found.skipped, 'run')}")
    errors = [*found.errors, *([] if found.no_engine is None else [found.no_engine])]
    if not runs and not errors:
        log("nothing to remove")
    if nodes and runs:  # every `down` on these nodes repeats the others
        errors = [each for each in errors if each is found.no_engine]
    return [*runs], errors


def _interrupted(left: Sequence[str]) -> NotConfirmed:
    """Return the error for a Ctrl-C. left: what has not been confirmed yet."""
    what = "interrupted; not confirmed, and possibly still running:\n" + "\n".join(left)
    return NotConfirmed("down", what, "to finish, repeat the command; to see what still runs: launcher runs")


def _name_others(stopped: Collection[str], wanted: str | None, report: Reporter, ssh_config: Path | None) -> None:
    """After a run that the launcher chose, name the others that were meant, perhaps; and a sweep that goes on."""
    for other in maybe_running(wanted, ssh_config=ssh_config):  # none if `wanted` is an ID
        if other not in stopped:
            report.warn(f"{other} may still be running; to stop it, run: launcher down {other}")
    for group in sweeps_that_go_on(stopped):
        what = f"a launcher on this machine goes on with the sweep {group} and starts its next variants"
        report.warn(f"{what}; to end that, press Ctrl-C twice there, or end it and run: launcher down {group}")


def _as_json(removed: Removed) -> dict[str, object]:
    containers = [
        {"name": c.state.name, "exit_code": c.state.exit_code, "stopped": c.stopped} for c in removed.containers
    ]
    kept = [
        {"what": each.what, "why": each.why, "unfetched": [{"path": f.path, "bytes": f.size} for f in each.unfetched]}
        for each in removed.kept
    ]
    left = [{"name": each.name, "bytes": each.size} for each in removed.left_in_shm]
    return {
        "node": removed.node,
        "containers": containers,
        "swept": [*removed.cleared],
        "shared_memory": left,
        "kept": kept,
    }


def _print(report: Reporter, one: _Stopped, *, purge: bool) -> None:
    console, run, confirmed = report.err, one.run, not one.failed
    if one.written is not None and (said := str(replace(one.written, outside=None))):  # what is kept is named below
        report.log(run.mask(said))
    for node in one.removed:
        shown = [_ended(c) for c in node.containers if c.state.labels.get(labels.PURPOSE) != "claim"]
        cleared = f", also removed {', '.join(node.cleared)}" if node.cleared else ""
        console.print(f"{escape(node.node)}: {escape(', '.join(shown) or 'nothing to remove')}{escape(cleared)}")
    for node in one.removed:
        if node.left_in_shm:
            console.print(escape(f"{node.node}: {node.left_in_words}"))
    kept = [f"{node.node}: {each}" for node in one.removed for each in node.kept]
    for line in kept:
        console.print(escape(run.mask(line)))
    if kept:
        fix = f"to download these files: launcher fetch {run.id} --checkpoints; to delete them: "
        console.print(f"{fix}launcher down {run.id}{' --purge' * purge} --unfetched")
    elif purge and confirmed:
        console.print("its output folders on the nodes are deleted")
    if confirmed:
        console.print(f"[bold]down[/] {run.id}")


def _ended(container: EndedContainer) -> str:
    state = container.state
    how = f"exit {state.exit_code}"
    if container.stopped:
        how = "stopped"
    elif state.exit_code is None:
        how = "exit code not recorded" if state.phase.ended else "never started"
    return f"{state.name} ({how})"
