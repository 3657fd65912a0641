"""The trainer that comes with the launcher, the package `train`: added to the code of a job that lacks it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import launcher
from launcher.job.models import Job
from launcher.records.code_files import CodeFile

TRAINER = "train"


def needed_trainer(job: Job, folder: Path, files: Iterable[CodeFile]) -> Path | None:
    """The installed package's folder where the job runs it and these files of its code folder are no such module.

    Raises JobInvalid where it is not installed, or where the code has a file or a link of that name.
    """
    if (job.run.module or "").partition(".")[0] != TRAINER:
        return None
    own = [
        file.name for file in files if file.name in (TRAINER, f"{TRAINER}.py") or file.name.startswith(f"{TRAINER}/")
    ]
    taken = TRAINER in own  # by a file or a link
    if any(name.endswith(".py") for name in own) or (taken and any((folder / TRAINER).glob("*.py"))):
        return None
    installed = Path(launcher.__file__).parent.with_name(TRAINER)  # any other `train` on the path is not it
    lacks = f"the code folder {folder} has no module {TRAINER}, and"
    if taken:
        problem = f"{lacks} {folder / TRAINER} takes the name of the launcher's own; rename it"
        job.refuse([(("run", "module"), problem)])
    if not (installed / "__main__.py").is_file():
        fix = "correct `code`, or run: pip install 'launcher[train]'"
        job.refuse([(("run", "module"), f"{lacks} the launcher's own is not installed; {fix}")])
    return installed
