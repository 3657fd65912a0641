"""What `launcher up` does with a job that is a sweep."""

from __future__ import annotations

from contextlib import ExitStack

from launcher import Run
from launcher.api.until_started import until_started
from launcher.cli import terminal
from launcher.cli.console import Screen
from launcher.cli.follow import follow, stop_now
from launcher.cli.terminal import Reporter
from launcher.cli.up import Asked, run_one, started
from launcher.errors import StoppedByUser, UsageError
from launcher.features.sweeps.alone import alone
from launcher.features.sweeps.array import members, up_array
from launcher.features.sweeps.codes import resolved_sweep
from launcher.features.sweeps.continued import known_sweep, with_budget
from launcher.features.sweeps.screen import SweepScreen, run_sweep
from launcher.features.sweeps.summary import recorded
from launcher.job.models import Job
from launcher.job.overrides import variants
from launcher.model.sizes import counted
from launcher.records.groups import sweep_named
from launcher.records.sweeps import command_of
from launcher.run.cluster import Destination, on_cluster


def up_sweep(job: Job, asked: Asked, most: int | None) -> int:
    """Run the variants; return the exit code. most: in parallel on a pool, None: no limit. Raises LauncherError."""
    with until_started():
        resumed = None if asked.resume is None else sweep_named(asked.resume)
        job = resolved_sweep(job if resumed is None else with_budget(job, resumed, "--resume"), resumed)
    cluster = None if asked.on is None else on_cluster(asked.on)
    if cluster is not None and cluster.starts_together:
        return _run_array(job, asked, cluster)
    if asked.detach:
        how = "start when a machine of the pool is free" if job.each else "run one after another"
        what = f"its variants {how}, and with -d no process would start the next one"
        raise UsageError(f"{asked.file}: sweep", what, "omit -d; to run without a terminal: nohup launcher up JOB &")
    if cluster is None and (job.each or resumed):
        return run_sweep(job, resume=resumed or asked.resume, most=most, ssh_config=asked.ssh_config)
    code, made, screen = 0, members(job), SweepScreen()
    name = made[0][1].group
    with alone(name):
        screen.log(f"{name}: {len(made)} variants")
        for variant, group in made:
            ended = run_one(variant, asked, group)
            code = max(code, ended or 0)
            if ended in (None, StoppedByUser.exit_code):  # the user has detached or stopped the sweep
                break
    screen.conclude(name, recorded(name, job), _resume(job, name, asked))
    return code


def _resume(job: Job, name: str, asked: Asked) -> str:
    return command_of(known_sweep(job), name, asked.on)


def _run_array(job: Job, asked: Asked, cluster: Destination) -> int:
    with ExitStack() as held:
        made = up_array(job, cluster, resume=asked.resume, log=Reporter().log, ssh_config=asked.ssh_config)
        runs = [*map(held.enter_context, made)]
        group = next((run.group.group for run in runs if run.group), None)
        group = group or (None if asked.resume is None else sweep_named(asked.resume))
        assert group is not None  # without a run, a sweep is resumed of which all variants have a result
        return _follow_array(runs, job, group, asked)


def _follow_array(runs: list[Run], job: Job, name: str, asked: Asked) -> int:
    """Follow the runs in turn and return the worst exit code.

    Detaching from one run detaches from all; stopping one stops the rest.
    """
    Reporter().log(f"{name}: {counted(len(runs), 'variant')} on the cluster, of {len(variants(job))}")
    code = 0
    if asked.json:
        terminal.say_json([started(run) for run in runs])
    for run in [] if asked.detach else runs:
        with Screen(run.mask, raw=asked.raw) as screen:
            if code == StoppedByUser.exit_code:
                stop_now(run, screen)
                continue
            ended = follow(run, screen)
        if ended is None:
            Reporter().log(f"the other variants continue too. To list them: launcher runs {name}")
            return 0
        code = max(code, ended)
    if asked.detach:
        Reporter().log(f"to list them: launcher runs {name}")
    else:
        SweepScreen().conclude(name, recorded(name, job), _resume(job, name, asked))
    return code
