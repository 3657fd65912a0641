"""A job, and its plan: nothing is started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from launcher.job.files import check_files
from launcher.job.loader import job_from, load_job
from launcher.job.models import Job
from launcher.job.overrides import of_one_run
from launcher.model.plan import Plan
from launcher.model.progress import Log
from launcher.node.connect import connect
from launcher.planning.offline import offline as assume
from launcher.records.snapshot import pack
from launcher.run.prepare import preview

JobLike = str | PathLike[str] | Mapping[str, Any] | Job


def load(
    source: JobLike,
    *,
    set: Mapping[str, Any] | Sequence[str] = (),  # noqa: A002 - the command's option
    nodes: Sequence[str] | None = None,
) -> Job:
    """The job of a job file, or of a mapping with a job file's keys.

    set: values by dotted key, {"run.args.epochs": 2}, or texts as of the command's option, "run.args.epochs=2". nodes:
    run on these instead. A Job is returned as it is. Raises JobInvalid with all that is wrong.
    """
    if isinstance(source, Job):
        return source
    texts = (
        [f"{key}={json.dumps(value, default=str)}" for key, value in set.items()] if isinstance(set, Mapping) else set
    )
    if isinstance(source, Mapping):
        return job_from(source, texts, nodes)
    return load_job(source, texts, nodes)


def plan(
    job: JobLike, *, offline: bool = False, log: Log = print, ssh_config: str | PathLike[str] | None = None
) -> Plan:
    """The exact containers, variables and commands of a run of this job; `up` executes such a plan.

    offline: connect to no node, and assume what nodes would answer. Otherwise they are examined; nothing is built,
    pulled or sent. log: called with each line of text. Raises JobInvalid, PlanInvalid, NodesFailed.
    """
    loaded = of_one_run(load(job))
    check_files(loaded, Path.cwd(), os.environ)
    code = pack(loaded, Path.cwd(), log)
    if offline:
        return assume(loaded, code.digest)
    with connect(loaded.hosts(), loaded.runtime, chosen_config(ssh_config)) as fleet:
        return preview(loaded, fleet, code.digest)


def chosen_config(path: str | PathLike[str] | None) -> Path | None:
    """The ssh config that is used instead of the user's own: this one, else that of LAUNCHER_SSH_CONFIG."""
    chosen = path or os.environ.get("LAUNCHER_SSH_CONFIG")
    return Path(chosen) if chosen else None
