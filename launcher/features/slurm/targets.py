"""The target `slurm` of `launcher export`."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

from launcher.cli import terminal
from launcher.export.target import Target
from launcher.features.slurm import cluster, script
from launcher.job.files import code_folder
from launcher.job.models import Job
from launcher.job.settings import read_settings
from launcher.records.code_files import code_files, readable
from launcher.records.trainer import needed_trainer


def _text(job: Job, on: str | None, image: str | None) -> str:  # noqa: ARG001 - the image is the job's
    _refuse_revision(job)
    _note_trainer(job)
    settings = read_settings(os.environ)
    if on is None:
        names = [name for name, each in settings.clusters.items() if each.kind == "slurm"]
        yours = (
            f"to use those of a cluster: --on {' or '.join(names)}"
            if names
            else "clusters are described in docs/slurm.md"
        )
        terminal.Reporter().log(
            f"the script is for no particular cluster: it has no partition or other settings; {yours}"
        )
    text, warnings = cluster.text(job, script.ANY if on is None else settings.cluster(on))
    for warning in warnings:
        terminal.Reporter().warn(warning)
    return text


def _refuse_revision(job: Job) -> None:
    """`up --on` sends the code, but an exported script runs in the folder in which it is submitted."""
    if job.revision is not None:
        job.refuse([(("revision",), "a script runs in the folder of the code: check the revision out, and remove it")])


def _note_trainer(job: Job) -> None:
    """If `up` would add the launcher's trainer to the code, print how to do so manually. Raises JobInvalid."""
    code = code_folder(job, Path.cwd())
    if not code.is_dir():  # the code may be on another machine
        return
    with readable(code):
        trainer = needed_trainer(job, code, code_files(code))
    if trainer is not None:
        copy = shlex.join(["cp", "-R", str(trainer), f"{code}/"])
        terminal.Reporter().log(
            f"`up --on` adds the launcher's module {trainer.name} to the code; to do so manually: {copy}"
        )


_KEYS = replace(script.KEYS, refused_by={**script.KEYS.refused_by, _refuse_revision: "revision"})
SLURM = Target(_KEYS, _text)
