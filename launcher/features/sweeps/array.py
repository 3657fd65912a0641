"""A sweep on a cluster that starts several runs with one request: all of them, or none."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from launcher.api.run import Run
from launcher.api.up import Destination, StartOptions, inputs_of, run_to_resume, start_on, until_started
from launcher.errors import LauncherError, StoppedByUser
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep, variant_name
from launcher.model.plan import Membership, new_run_id
from launcher.model.progress import Log
from launcher.node.connect import Fleet
from launcher.records.paths import RunPaths
from launcher.records.store import Record
from launcher.run.start import undo
from launcher.run.state import RunState


def variants(job: Job) -> list[tuple[Job, Membership]]:
    """Return the jobs of a sweep, each with its membership in one new group."""
    group = new_run_id(job.name)
    return [
        (each, Membership(group, variant_name(variant)))
        for each, variant in zip(expand_sweep(job), job.sweep, strict=True)
    ]


def up_array(job: Job, destination: Destination, *, resume: str | None, log: Log, ssh_config: Path | None) -> list[Run]:
    """Submit the variants of a sweep: the last start submits all of them. Raises as launcher.up.

    The runs share a connection, as a new one might ask for a password again.
    """
    jobs, started = variants(job), threading.Event()
    ids = [new_run_id(each.name) for each, _ in jobs]
    said = set[str]()

    def once(text: str) -> None:
        """The messages about a start are the same for each variant."""
        if text not in said:
            said.add(text)
            log(text)

    options = StartOptions(run_to_resume(resume), log=once, ssh_config=ssh_config)
    with until_started(started), ExitStack() as on_error:
        inputs = inputs_of(jobs[0][0], destination, once)  # variants differ only in `args`
        fleet = on_error.enter_context(destination.connect(ssh_config))
        runs = list[Run]()
        try:
            for (each, group), run in zip(jobs, ids, strict=True):
                own = replace(options, run=run, together=ids if len(ids) > 1 else ())
                runs.append(start_on(fleet, each, destination, inputs, group, own))
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
