"""`launcher up`: start a job and follow it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

import launcher
from launcher.api.until_started import until_started
from launcher.cli import options, terminal
from launcher.cli.console import Screen
from launcher.cli.follow import follow, leave_or_stop
from launcher.cli.long_work import LongWork
from launcher.errors import UsageError
from launcher.job.models import Job
from launcher.model.container import Phase
from launcher.model.plan import Membership


@dataclass(frozen=True)
class Asked:
    """The command line of `up`. file: the job file as it was given; the others as for launcher.up."""

    file: Path
    on: str | None
    resume: str | None
    detach: bool
    wait: bool
    raw: bool
    json: bool
    ssh_config: Path | None


# Called with the job before anything is contacted. Returns the exit code of a job that the feature has run in place of
# `up`, else None. Raises LauncherError.
Option: TypeAlias = Callable[[Job, Asked], int | None]


def up(
    job: options.JobFile,
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Start the run and return; `launcher logs` follows it.")
    ] = False,
    resume: options.Resume = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait while GPUs or the port are in use.")] = False,
    raw: options.Raw = False,
    json: Annotated[bool, typer.Option("--json", help="With -d: print the started run as JSON.")] = False,
    on: options.On = None,
    ssh_config: options.SshConfig = None,
    *,
    added: Sequence[Option] = (),
) -> None:
    """A second Ctrl-C stops the run. In background jobs of scripts (nohup launcher
    up JOB &) Ctrl-C is ignored. SIGTERM ends only the launcher, not the run.

    Exit codes: 0 done or detached, 1 job failed, 2 invalid request, 3 node
    unreachable or unsuitable, 4 image failed, 5 stopped, 6 not confirmed.

    Example: launcher up job.yaml --set run.args.epochs=3
    """
    if json and not detach:
        what = "needs -d: without it, the program's output is printed"
        raise UsageError("--json", what, "add -d; to follow the run: launcher logs RUN")
    with until_started():
        from launcher.api.up import from_store

        loaded = launcher.load(job, set=sets or [], nodes=options.hosts(nodes))
        loaded, run = from_store(loaded, resume)
    asked = Asked(job, on, run, detach, wait, raw, json, ssh_config)
    for option in added:
        if (code := option(loaded, asked)) is not None:
            sys.exit(code)
    sys.exit(run_one(loaded, asked) or 0)


def run_one(job: Job, asked: Asked, group: Membership | None = None) -> int | None:
    """Start a run and follow it. group: as for launcher.up. Return the exit code, or None if the user detached."""
    with LongWork() as work:
        run = launcher.up(
            job,
            on=asked.on,
            resume=asked.resume,
            wait=asked.wait,
            log=work.log,
            progress=work.progress,
            group=group,
            ssh_config=asked.ssh_config,
        )
    with run:
        return attend(run, asked)


def started(run: launcher.Run) -> dict[str, Any]:
    """Return a run that has just been started, for programs."""
    group = run.group
    member = {"group": group and group.group, "variant": group and group.variant}
    return {"run": run.id, **member, "nodes": list(run.nodes)}


def attend(run: launcher.Run, asked: Asked) -> int | None:
    """Follow a run that has just been started. Return the exit code, or None if the user detached."""
    if asked.json:
        terminal.say_json(started(run))
    with Screen(run.mask, raw=asked.raw) as screen:
        try:
            where, screen.first.queued = _where(run)
            screen.log(where)
            if asked.detach:
                screen.log(
                    f"{'' if screen.first.queued else f'{run.id} is running. '}To follow it: launcher logs {run.id}"
                )
                return None
            if len(run.nodes) > 1 and not screen.first.queued:
                screen.log(f"output of {run.nodes[0]}; that of all nodes: launcher logs --all")
        except KeyboardInterrupt:
            return leave_or_stop(run, screen)
        return follow(run, screen)


def _where(run: launcher.Run) -> tuple[str, bool]:
    """Return where it runs, and whether a cluster has not started it yet."""
    plan, name = run.plan, f"{run.id} ({run.group.shown})" if run.group else run.id
    if plan is None:
        return f"{name} is running", False
    if not plan.rendezvous.address:  # the cluster chooses
        state = next(iter(run.containers().values()))
        where = f"{name} was submitted to {plan.master.host}, {state.error or state.phase.value}"
        return where, state.phase is Phase.CREATED
    address = f"{plan.rendezvous.address}:{plan.rendezvous.port}"
    names = [node.node for node in plan.nodes]
    size = len(names) - plan.spares
    spares = f" (spare: {', '.join(names[size:])})" if plan.spares else ""
    return f"{name} runs on {', '.join(names[:size])}{spares}, rendezvous at {address}", False
