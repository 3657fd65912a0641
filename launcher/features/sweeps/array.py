"""A sweep on a cluster that starts several runs with one request: all of them, or none."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from launcher.api.inputs import Inputs, inputs_had, inputs_of
from launcher.api.run import Run
from launcher.api.until_started import until_started
from launcher.api.up import StartOptions, run_to_resume, start_on
from launcher.errors import LauncherError, StoppedByUser
from launcher.features.sweeps.codes import code_of
from launcher.features.sweeps.continued import added, continued, ended_meanwhile, known_sweep, member, say_ended
from launcher.job.models import Job
from launcher.job.overrides import variants
from launcher.model.plan import Membership, new_run_id
from launcher.model.progress import Log
from launcher.node.connect import Fleet
from launcher.records.groups import sweep_named
from launcher.records.paths import RunPaths
from launcher.records.store import Record
from launcher.run.begin.earlier import Earlier
from launcher.run.begin.start import undo
from launcher.run.cluster import Destination
from launcher.run.state import RunState

COLLECTS = 300.0  # seconds for collecting the files of a run that has ended


def members(job: Job) -> list[tuple[Job, Membership]]:
    """Return the jobs of a sweep, each with its membership in one new group."""
    group, known = new_run_id(job.name), known_sweep(job)
    return [(variant.job, member(group, variant, known)) for variant in variants(job)]


def up_array(job: Job, destination: Destination, *, resume: str | None, log: Log, ssh_config: Path | None) -> list[Run]:
    """Submit the variants of a sweep: the last start submits all of them. Raises as launcher.up.

    The runs share a connection, as a new one might ask for a password again. resume: a run, from which all of them
    start; or a sweep: variants that have no result and are not on the cluster any more are submitted again. Return
    these, and those that still are.
    """
    group = None if resume is None else sweep_named(resume)
    if group is None:
        earlier = run_to_resume(resume)
        return _submit([(*each, earlier, None) for each in members(job)], destination, log, ssh_config)
    left, followed = _left(job, group, log, ssh_config)
    return [*followed, *(_submit(left, destination, log, ssh_config) if left else [])]


_Chosen = tuple[Job, Membership, Earlier | None, Record | None]  # the run from whose checkpoint it starts; whose code


def _left(job: Job, group: str, log: Log, ssh_config: Path | None) -> tuple[list[_Chosen], list[Run]]:
    """Return the variants of an earlier sweep that are to be submitted, and the runs that have not ended."""
    left, followed, known, every = list[_Chosen](), list[Run](), continued(job, group, log), known_sweep(job)
    now = [(variant.job, member(group, variant, every)) for variant in variants(job)]
    for each, own in [*now, *added(job, known, log)]:
        record = known.get(own.variant)
        if record is None:
            left.append((each, own, None, None))
            continue
        run = Run(record, ssh_config, log)
        if run.outcome is None and (outcome := ended_meanwhile(run, COLLECTS)):
            say_ended(own.variant, run, outcome, log)
        if run.outcome is None and run.status().state != RunState.REMOVED:
            followed.append(run)
            continue
        run.close()
        if run.outcome is None or run.outcome.state is not RunState.DONE:
            had, earlier = record if job.codes or own.added else None, run.id if record.started else record.resumes
            left.append((each, own, None if earlier is None else Earlier(earlier, required=False), had))
    return left, followed


def _submit(chosen: Sequence[_Chosen], cluster: Destination, log: Log, ssh_config: Path | None) -> list[Run]:
    started = threading.Event()
    ids = [new_run_id(each.name) for each, *_ in chosen]
    destination = replace(cluster, together=ids if len(ids) > 1 else ())
    said = set[str]()

    def once(text: str) -> None:
        """The messages about a start are the same for each variant."""
        if text not in said:
            said.add(text)
            log(text)

    options = StartOptions(log=once, ssh_config=ssh_config)
    with until_started(started), ExitStack() as on_error:
        inputs = dict[tuple[str, str | None], Inputs]()  # by code: variants differ else only in `args`
        for each, _, _, had in chosen:
            if had is None and code_of(each) not in inputs:
                inputs[code_of(each)] = inputs_of(each, destination, once)
        fleet = on_error.enter_context(destination.connect(ssh_config))
        runs = list[Run]()
        try:
            for (each, group, earlier, had), run in zip(chosen, ids, strict=True):
                sent = inputs[code_of(each)] if had is None else inputs_had(each, had, once)
                own = replace(options, resume=earlier, run=run)
                runs.append(start_on(fleet, each, destination, sent, group, own))
        except BaseException as error:
            _undo(runs, fleet, error)
            raise
        started.set()
        on_error.pop_all()
    return runs


def _undo(runs: Sequence[Run], fleet: Fleet, cause: BaseException) -> None:
    """Remove the variants that were created before another one failed, which has cleaned up after itself."""
    code = cause.exit_code if isinstance(cause, LauncherError) else StoppedByUser.exit_code
    for run in runs:
        assert run.plan is not None
        undo(run.plan, fleet, cause)
        record = Record(RunPaths(run.folder))
        record.event("undone", reason=str(cause) or type(cause).__name__)
        record.finish({"state": RunState.FAILED, "exit_code": code, "why": str(cause)})
