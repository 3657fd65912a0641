"""The code of a sweep's variants: its revisions are looked up once, and all code is checked, before a start."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.job.files import check_files
from launcher.job.models import Job
from launcher.job.overrides import variants
from launcher.model.plan import RunId
from launcher.model.progress import silent
from launcher.records import sweeps
from launcher.records.exported import exported
from launcher.records.revisions import resolved
from launcher.records.snapshot import list_code
from launcher.records.trainer import check_options


def resolved_sweep(job: Job, group: RunId | None) -> Job:
    """Return the job with commits in place of its revisions. group: a sweep that is resumed, whose commits count.

    Raises JobInvalid if a revision or folder does not exist, or a file of its code is missing.
    """
    known = None if group is None else sweeps.known(group)
    made = resolved(job, Path.cwd(), known.commits if known else None)
    if made.codes and group is None:
        seen = set[str]()
        for variant, code in zip(variants(made), (code for code in made.codes for _ in made.sweep), strict=True):
            if code not in seen:
                seen.add(code)
                _check(variant.job.model_copy(update={"sweep": made.sweep}))
    return made


def _check(job: Job) -> None:
    """Check one code, with the arguments of all variants."""
    here = Path.cwd()
    with exported(job, here) as code:
        check_files(job, here, os.environ, code.folder if code else None)
        listing = list_code(job, here, silent, exported=code)
        check_options(job, listing.folder, listing.trainer, silent)
