"""The sweep that `--resume GROUP` continues: whether this job is the one that was started, with the same settings."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.errors import UsageError
from launcher.job.models import Job
from launcher.job.overrides import expand_sweep, variant_name
from launcher.job.scalars import Args, ArgValue
from launcher.model.plan import KnownSweep, Membership
from launcher.model.progress import Log
from launcher.records.groups import latest_of, settings, settings_of, short
from launcher.records.store import Record, job_of


def known_sweep(job: Job, most: int | None = None) -> KnownSweep:
    """Return what is recorded beside the runs of a job's sweep. most: of --max-parallel."""
    options = (*job.options, *(() if most is None else ("--max-parallel", str(most))))
    return KnownSweep(tuple(map(variant_name, job.sweep)), "" if job.file is None else str(job.file), options)


def member(group: str, args: Args, known: KnownSweep) -> Membership:
    """Return the membership of a run of the variant with these arguments."""
    return Membership(group, variant_name(args), known, args)


def continued(job: Job, group: str, log: Log) -> dict[str, Record]:
    """Return the latest run of each variant of a recorded group. Settings of the job that have changed since are said.

    Raises UsageError if the group is unknown here, or of a job with another name.
    """
    earlier = latest_of(group)
    if not earlier:
        fix = "go to the folder where it was started; to list its runs: launcher runs"
        raise UsageError("--resume", f"{group} is not a sweep recorded here", fix)
    names = {job_of(record.run) for record in earlier.values()}
    if job.name not in names:
        what = f"{group} is a sweep of {', '.join(sorted(names))}, and this job is {job.name}"
        raise UsageError("--resume", what, "give its job file, with the same --set, if any")
    now = {variant_name(args): each for args, each in zip(job.sweep, expand_sweep(job), strict=True)}
    started = [(record, now[name]) for name, record in earlier.items() if name in now]
    if changed := sorted({text for record, each in started for text in _changed(record, each)}):
        what = f"the job has changed since {group} was started: {', '.join(changed)}"
        log(f"warning: {what}; the variants that are started now use it")
    return earlier


def _changed(record: Record, job: Job) -> list[str]:
    """Return `steps=40 (20 before)` for each argument, variable and image that a variant's run had otherwise."""
    before, now = _compared(settings(record)), _compared(settings_of(job))
    if not before:  # its job.yaml is missing
        return []
    keys = dict.fromkeys((*now, *before))
    return [
        f"{key}={short(now.get(key, 'default'))} ({short(before.get(key, 'default'))} before)"
        for key in keys
        if now.get(key) != before.get(key)
    ]


def _compared(found: Mapping[str, ArgValue]) -> dict[str, ArgValue]:
    """Without the machines, which a sweep may get and lose."""
    return {key: value for key, value in found.items() if key not in ("nodes", "hosts", "gpus", "processes")}
