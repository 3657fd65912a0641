"""A start of a variant that is tried again, on other machines or later, if GPUs or the port are in use."""

from __future__ import annotations

from dataclasses import replace

from launcher.api.inputs import Inputs
from launcher.api.run import Run
from launcher.api.up import StartOptions, start_run
from launcher.errors import InUse, NodesFailed
from launcher.job.models import Job
from launcher.model.plan import Membership, new_run_id
from launcher.records.paths import RunPaths
from launcher.records.store import Record
from launcher.run.cluster import own_machines


def attempt(job: Job, inputs: Inputs, group: Membership, options: StartOptions) -> Run:
    """Start a run on the job's machines. An attempt that is refused as GPUs or the port are in use leaves no record."""
    run = new_run_id(job.name)
    try:
        return start_run(job, own_machines(job), inputs, group, replace(options, run=run))
    except NodesFailed as error:
        if all(isinstance(each, InUse) for each in error.errors):
            Record(RunPaths(inputs.runs / run)).remove()
        raise
