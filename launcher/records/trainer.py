"""The launcher's trainer, the package `train`, which is added to the code of jobs that run it and do not have it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import launcher
from launcher.job.models import Job
from launcher.records.code_files import CodeFile

TRAINER = "train"


def needed_trainer(job: Job, folder: Path, files: Iterable[CodeFile]) -> Path | None:
    """Return the folder of the installed trainer if the job runs it and the files of its code do not contain it.

    Raises JobInvalid if it is not installed, or if the code has another file or link of that name.
    """
    if (job.run.module or "").partition(".")[0] != TRAINER:
        return None
    own = [
        file.name for file in files if file.name in (TRAINER, f"{TRAINER}.py") or file.name.startswith(f"{TRAINER}/")
    ]
    taken = TRAINER in own  # by a file or a link
    if any(name.endswith(".py") for name in own) or (taken and any((folder / TRAINER).glob("*.py"))):
        return None
    installed = Path(launcher.__file__).parent.with_name(TRAINER)  # sys.path may have another `train`
    missing = f"the code folder {folder} has no module {TRAINER}, and"
    if taken:
        problem = f"{missing} {folder / TRAINER} conflicts with the launcher's trainer; rename it"
        job.refuse([(("run", "module"), problem)])
    if not (installed / "__main__.py").is_file():
        fix = "correct `code`, or run: pip install 'launcher[train]'"
        job.refuse([(("run", "module"), f"{missing} the launcher's trainer is not installed; {fix}")])
    return installed
