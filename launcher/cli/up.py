"""`launcher up`: start a job and follow it; run the variants of a sweep in turn, or as a job array on a cluster."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Annotated

import typer

import launcher
from launcher import Run
from launcher.api.sweep import is_sweep
from launcher.api.up import until_started, up_array, variants
from launcher.cli import options
from launcher.cli.console import Screen
from launcher.cli.foreground import follow, leave_or_stop, stop_now
from launcher.cli.long_work import LongWork
from launcher.cli.sweep import run_sweep
from launcher.cli.terminal import Reporter
from launcher.errors import StoppedByUser, UsageError


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
    most: Annotated[
        int | None, typer.Option("--max-parallel", metavar="N", min=1, help="Run at most N variants in parallel.")
    ] = None,
    on: options.On = None,
    ssh_config: options.SshConfig = None,
) -> None:
    """A second Ctrl-C stops the run. In background jobs of scripts (nohup launcher
    up JOB &) Ctrl-C is ignored. SIGTERM ends only the launcher, not the run.

    The variants of a sweep run one after another, or in parallel on a pool of
    machines; --resume GROUP runs those without a result.

    Exit codes: 0 done or detached, 1 job failed, 2 invalid request, 3 node
    unreachable or unsuitable, 4 image failed, 5 stopped, 6 not confirmed.

    Example: launcher up job.yaml --set run.args.epochs=3
    """
    log = Reporter().log
    with until_started():
        loaded = launcher.load(job, set=sets or [], nodes=options.hosts(nodes))
    if loaded.sweep and on is not None:
        with ExitStack() as held:
            runs = [*map(held.enter_context, up_array(loaded, on, resume=resume, log=log, ssh_config=ssh_config))]
            sys.exit(_follow_array(runs, detach=detach, raw=raw))
    if loaded.sweep and detach:
        what = "its variants run one after another, and with -d no process would start the next one"
        raise UsageError(f"{job}: sweep", what, "omit -d; to run without a terminal: nohup launcher up JOB &")
    if loaded.sweep and (loaded.each or is_sweep(resume)):
        sys.exit(run_sweep(loaded, resume=resume, most=most, ssh_config=ssh_config))
    code = 0
    for variant, group in variants(loaded):
        with LongWork() as work:
            run = launcher.up(
                variant,
                on=on,
                resume=resume,
                wait=wait,
                log=work.log,
                progress=work.progress,
                group=group,
                ssh_config=ssh_config,
            )
        with run:
            ended = _attend(run, detach=detach, raw=raw)
        code = max(code, ended or 0)
        if ended in (None, StoppedByUser.exit_code):  # the user has detached or stopped the sweep
            break
    sys.exit(code)


def _attend(run: Run, *, detach: bool, raw: bool) -> int | None:
    """Follow a run that has just been started. Return the exit code, or None if the user detached."""
    with Screen(run.mask, raw=raw) as screen:
        try:
            screen.log(_where(run))
            if detach:
                screen.log(f"{run.id} is running. To follow it: launcher logs {run.id}")
                return None
        except KeyboardInterrupt:
            return leave_or_stop(run, screen)
        return follow(run, screen)


def _follow_array(runs: list[Run], *, detach: bool, raw: bool) -> int:
    """Follow the runs in turn and return the worst exit code.

    Detaching from one run detaches from all; stopping one stops the rest.
    """
    group = runs[0].group
    name = group.group if group else runs[0].id
    Reporter().log(
        f"{len(runs)} variants were submitted as one job array. To compare the results: launcher compare {name}"
    )
    code = 0
    for run in [] if detach else runs:
        with Screen(run.mask, raw=raw) as screen:
            if code == StoppedByUser.exit_code:
                stop_now(run, screen)
                continue
            ended = follow(run, screen)
        if ended is None:
            Reporter().log("the other variants continue too. To list them: launcher runs")
            return 0
        code = max(code, ended)
    return code


def _where(run: Run) -> str:
    plan = run.plan
    if plan is None:
        return f"{run.id} is running"
    if not plan.rendezvous.address:  # the cluster chooses
        state = next(iter(run.containers().values()))
        return f"{run.id} was submitted to {plan.master.host}, {state.error or state.phase.value}"
    address = f"{plan.rendezvous.address}:{plan.rendezvous.port}"
    names = [node.node for node in plan.nodes]
    size = len(names) - plan.spares
    spares = f" (spare: {', '.join(names[size:])})" if plan.spares else ""
    return f"{run.id} runs on {', '.join(names[:size])}{spares}, rendezvous at {address}"
