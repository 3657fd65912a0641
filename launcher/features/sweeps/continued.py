"""The sweep that `--resume GROUP` continues: whether this job is the one that was started, with the same settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from launcher.api.run import Run
from launcher.errors import LauncherError, UsageError
from launcher.job.loader import parse_job
from launcher.job.models import Job
from launcher.job.overrides import JobVariant, asked_for, short_commit, shown_value, variants
from launcher.job.scalars import ArgValue, show_duration
from launcher.model.plan import KnownSweep, Membership, RunId, plain
from launcher.model.progress import Log
from launcher.naming import first_of
from launcher.records.groups import budget_of, latest_of, runs_of, settings, settings_of, short
from launcher.records.masking import MASK, names_secret
from launcher.records.paths import RUNS, RunPaths
from launcher.records.store import Record, job_of
from launcher.records.sweeps import known
from launcher.run.result import Outcome
from launcher.run.state import RunState

_NAMED = 5  # variants in a message


def known_sweep(job: Job, most: int | None = None) -> KnownSweep:
    """Return what is recorded beside the runs of a job's sweep. most: of --max-parallel."""
    options = (*job.options, *(() if most is None else ("--max-parallel", str(most))))
    names = tuple(variant.name for variant in variants(job))
    commits = {text: code for text, code in job.commits.items() if code in job.codes}
    return KnownSweep(names, "" if job.file is None else str(job.file), options, commits, _settings(job))


def _settings(job: Job) -> dict[str, Any]:
    """Return the settings of a job as they are recorded of its sweep."""
    known = plain(_compared(settings_of(job)))
    return {key: MASK if names_secret(key) else value for key, value in known.items()}


def differing(job: Job, group: RunId) -> dict[str, str]:
    """Return the settings of a job that are others than those of the sweep's job; {} if these are not recorded."""
    sweep, latest = known(group), latest_of(group)
    if sweep is None or not sweep.settings or not latest:
        return {}
    now, before = next(iter(latest.values())).mask.deep(_settings(job)), sweep.settings
    keys = [key for key in dict.fromkeys((*now, *before)) if now.get(key) != before.get(key)]
    return {key: _shown(now[key]) if key in now else "default" for key in keys}


def _shown(value: Any) -> str:
    return shown_value(tuple(map(str, value)) if isinstance(value, list) else value)


def member(group: str, variant: JobVariant, known: KnownSweep) -> Membership:
    """Return the membership of a run of this variant."""
    revision, commit = variant.job.revision, ""
    if revision is not None and not known.commits:  # of all variants, and not in their names
        commit = short_commit(revision)
    asked = asked_for(variant.job) if revision is not None else ""
    return Membership(group, variant.name, known, variant.values, asked=asked, commit=commit)


def added(job: Job, earlier: Mapping[str, Record], log: Log) -> list[tuple[Job, Membership]]:
    """Return the variants that --into has added to a sweep: the job of each as it was run, and its membership.

    earlier: the latest run of each variant. One whose recorded job cannot be read is said, and left out.
    """
    found = []
    for name, record in earlier.items():
        if (own := record.group) is not None and own.added:
            try:
                before = parse_job(record.job_text(), str(record.paths.job))
            except (OSError, UnicodeDecodeError, LauncherError) as error:
                log(f"warning: {name} is left out, as its job cannot be read: {error}")
                continue
            keys = {key: getattr(before, key) for key in Job.model_fields}
            found.append((job.model_copy(update=keys), own))
    return found


def with_budget(job: Job, group: RunId, option: str) -> Job:
    """Return the job with the budget of the sweep, so that its variants can be compared. Raises UsageError if the job
    has another one. A sweep that began without a budget leaves it to each job. option: of the call, for the message.
    """
    runs = runs_of(group)
    of_this_job = runs and job_of(runs[0]) == job.name  # another one is refused for that
    budget = budget_of(Record(RunPaths(RUNS / runs[0]))) if of_this_job else None
    if budget is None or budget == job.budget:
        return job
    if job.budget is None and not _sets_budget(job):
        return job.model_copy(update={"budget": budget})
    has = "no budget" if job.budget is None else f"budget {show_duration(job.budget)}"
    what = f"the job has {has}, and {group} began with {show_duration(budget)}"
    fix = "remove `budget` from the job, or from --set: the variants of a sweep have the same one"
    raise UsageError(option, what, fix)


def _sets_budget(job: Job) -> bool:
    """Return whether --set gives the job its budget, or takes it."""
    return any(word.partition("=")[0].strip() in ("budget", "sweep.budget") for word in job.options[1::2])


def continued(job: Job, group: str, log: Log) -> dict[str, Record]:
    """Return the latest run of each variant of a recorded group. Settings of the job that have changed since are
    said, and variants that it does not have any more.

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
    now = {variant.name: variant.job for variant in variants(job)}
    started = [(record, now[name]) for name, record in earlier.items() if name in now]
    if changed := sorted({text for record, each in started for text in _changed(record, each)}):
        what = f"the job has changed since {group} was started: {', '.join(changed)}"
        but = any(member.added for record in earlier.values() if (member := record.group))
        use = "the variants that are started now use it" + (", but for those that --into has added" if but else "")
        log(f"warning: {what}; {use}")
    if left := _not_in_job(group, earlier, now):
        named = first_of(left, _NAMED)
        log(f"warning: variants of {group} that are not in the job are left as they are: {named}")
    return earlier


def _not_in_job(group: str, earlier: Mapping[str, Record], now: Collection[str]) -> list[str]:
    """Return the recorded variants of a sweep, but for those that --into has added, that are not among these."""
    sweep = known(group)
    own = [name for name, record in earlier.items() if record.group is None or not record.group.added]
    every = dict.fromkeys([*(sweep.variants if sweep else ()), *own])
    mask = next(iter(earlier.values())).mask  # names are recorded so
    return [name for name in every if name not in {*now, *map(mask, now)}]


def ended_meanwhile(run: Run, timeout: float) -> Outcome | None:
    """Record how a run ended that no launcher followed, and return it. None: it runs, or that is not known.

    timeout: seconds for collecting its files.
    """
    try:
        states = run.containers().values()
        ended = len(states) == len(run.nodes) and all(state.phase.ended for state in states)
        return run.wait(timeout) if ended else None
    except Exception:  # noqa: BLE001 - whoever follows it then meets the error again, and says it
        return None


def say_ended(variant: str, run: Run, outcome: Outcome, log: Log) -> None:
    """Say of a run that `ended_meanwhile` that it is run again, if it has no result, and what is left on its nodes."""
    if outcome.state is not RunState.DONE:
        why = f", {outcome.failure.node}: {outcome.failure.what}" if outcome.failure else ""
        how = f"{run.id} ended while no launcher followed it ({outcome.state.value}{why})"
        log(f"{variant}: {run.mask(how)}; it is run again")
    if written := run.written():
        log(f"{variant}: {run.mask(str(written))}")


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
