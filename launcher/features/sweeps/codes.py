"""The code of a sweep's variants: its revisions are looked up once, and all code is checked, before a start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.errors import JobInvalid
from launcher.job.files import check_files, code_folder, programs, programs_in
from launcher.job.models import Job, is_commit
from launcher.job.overrides import IN_SWEEP, short_commit, variants
from launcher.job.problems import Path as KeyPath
from launcher.model.plan import RunId
from launcher.model.progress import silent
from launcher.records import sweeps
from launcher.records.exported import exported
from launcher.records.revisions import resolved
from launcher.records.snapshot import list_code
from launcher.records.trainer import check_options


def resolved_sweep(job: Job, group: RunId | None) -> Job:
    """Return the job with commits in place of its revisions. group: a sweep that is resumed, whose commits count.

    Raises JobInvalid if a revision or folder does not exist, or a file of its code is missing; it names all of these.
    """
    known = None if group is None else sweeps.known(group)
    made = resolved(job, Path.cwd(), known.commits if known else None)
    if made.codes and group is None:
        _check(made)
    return made


def code_of(job: Job) -> tuple[str, str | None]:
    """Return what tells the code of a variant from that of others."""
    return job.code, job.revision


def _check(job: Job) -> None:
    """Check each code of a sweep. Raises JobInvalid with all problems."""
    has, wrong = dict[str, frozenset[str]](), list[JobInvalid]()
    for variant, code in zip(variants(job), (code for code in job.codes for _ in job.sweep), strict=True):
        if code not in has:
            has[code] = frozenset()
            try:
                has[code] = _checked(variant.job.model_copy(update={"sweep": job.sweep}))
            except JobInvalid as error:
                wrong.append(error)
    if wrong:
        lines = dict.fromkeys(map(str, wrong))  # what is wrong with all of them is said once
        raise JobInvalid(wrong[0].where, "\n".join(lines).removeprefix(f"{wrong[0].where}: "))
    job.refuse(_lacking(job, has))


def _checked(job: Job) -> frozenset[str]:
    """Check one code, with the arguments of all variants. Return what it has of that which the job starts."""
    here = Path.cwd()
    with exported(job, here) as code:
        check_files(job, here, os.environ, code.folder if code else None)
        listing = list_code(job, here, silent, exported=code)
        check_options(job, listing.folder, listing.trainer, silent)
        if listing.trainer is not None:  # the launcher's, which is added to the code
            return frozenset([str(job.run.module)])
        return programs(job, {file.name for file in listing.files}.__contains__)


def _lacking(job: Job, has: Mapping[str, frozenset[str]]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the codes without a program that `code` or another of them has, and so not the image."""
    every = programs_in(code_folder(job, Path.cwd()), job).union(*has.values())
    for index, code in enumerate(job.codes):
        if missing := sorted(every - has[code]):
            shown = short_commit(code) if is_commit(code) else code
            yield (*IN_SWEEP, index), f"{shown} has no {', '.join(missing)}, which the job starts"
