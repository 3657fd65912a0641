"""Load a job and make its plan, without starting anything."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from launcher.job.files import check_code, check_files
from launcher.job.loader import job_from, load_job, to_json
from launcher.job.models import Job
from launcher.job.overrides import of_one_run
from launcher.job.settings import read_settings
from launcher.model.plan import Plan
from launcher.model.progress import Log, silent
from launcher.node.connect import connect
from launcher.node.ssh.config import chosen_config
from launcher.planning.offline import offline as assume
from launcher.records import options, revisions
from launcher.records.exported import exported
from launcher.records.masking import fsspec_values, hide
from launcher.records.snapshot import list_code, pack
from launcher.records.trainer import check_options
from launcher.run.begin.prepare import preview
from launcher.run.cluster import kind_of

JobLike = str | PathLike[str] | Mapping[str, Any] | Job


def load(
    source: JobLike,
    *,
    set: Mapping[str, Any] | Sequence[str] = (),  # noqa: A002 - the name of the command-line option
    nodes: Sequence[str] | None = None,
) -> Job:
    """Load a job from a job file, or from a mapping with the keys of a job file.

    set: values by dotted key, {"run.args.epochs": 2}, or strings as for --set, "run.args.epochs=2". nodes: use these
    nodes instead of the job's. A Job is returned unchanged. Raises JobInvalid with all problems.
    """
    loaded = _loaded(source, set, nodes)
    hide(fsspec_values({**os.environ, **loaded.env}))
    return loaded


def _loaded(source: JobLike, set: Mapping[str, Any] | Sequence[str], nodes: Sequence[str] | None) -> Job:  # noqa: A002
    if isinstance(source, Job):
        return source
    texts = [f"{key}={to_json(key, value)}" for key, value in set.items()] if isinstance(set, Mapping) else set
    if isinstance(source, Mapping):
        return job_from(source, texts, nodes)
    return load_job(source, texts, nodes)


def resolved(job: Job) -> Job:
    """Return the job with commits in place of its revisions. Raises JobInvalid."""
    return revisions.resolved(job, Path.cwd())


def plan(
    job: JobLike, *, offline: bool = False, log: Log | None = print, ssh_config: str | PathLike[str] | None = None
) -> Plan:
    """Return the exact containers, variables and commands of a run of this job; `up` executes such a plan.

    offline: contact no node and assume the properties of the nodes. Otherwise the nodes are inspected; nothing is
    built, pulled or sent. log: called with each line of text; None: silent. Raises JobInvalid, PlanInvalid,
    NodesFailed.
    """
    log = log or silent
    loaded = of_one_run(load(job))
    with exported(loaded, Path.cwd()) as found:
        check_files(loaded, Path.cwd(), os.environ, found.folder if found else None)
        listing = list_code(loaded, Path.cwd(), log, exported=found)
        check_options(loaded, listing.folder, listing.trainer, log)
        notes = options.notes(loaded, listing)
        code = pack(listing, log)
    if offline:
        made = assume(loaded, code.digest)
    else:
        with connect(loaded.hosts(), loaded.runtime, chosen_config(ssh_config)) as fleet:
            made = preview(loaded, fleet, code.digest)
    return replace(made, warnings=(*made.warnings, *notes))


def plan_text(job: Job, cluster: str, log: Log = print) -> str:
    """Return what a run of this job on a cluster of the settings file submits; nothing is contacted.

    Raises UsageError, PlanInvalid.
    """
    settings = read_settings(os.environ).cluster(cluster)
    text, warnings = kind_of(settings).text(job, settings)
    for warning in warnings:
        log(f"warning: {warning}")
    check_code(job, Path.cwd())
    with exported(job, Path.cwd()) as found:
        listing = list_code(job, Path.cwd(), log, bare=settings.container == "none", exported=found)
        check_options(job, listing.folder, listing.trainer, log)
        for note in options.notes(job, listing):
            log(f"warning: {note}")
        pack(listing, log)
    return text
