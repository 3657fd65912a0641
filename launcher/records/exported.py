"""Code that is not in the job's code folder, as a git revision: in a temporary folder while it is packed.

A killed launcher leaves its folder, which the next one that needs such a folder removes.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from launcher.errors import UsageError
from launcher.job.models import Job
from launcher.job.problems import BadValueError
from launcher.model.home import cache_folder
from launcher.records.revisions import Exported, export

FOLDER = "exported"  # in the launcher's cache folder


@contextmanager
def exported(job: Job, cwd: Path) -> Iterator[Exported | None]:
    """Yield the code of the job's revision, until the block ends; None for a job without one.

    Raises JobInvalid if there is no such revision, or if not all of its files are in the repository; UsageError.
    """
    if job.revision is None:
        yield None
        return
    with temporary_folder() as folder:
        try:
            found = export(job, cwd, folder)
        except BadValueError as error:
            job.refuse([(("revision",), str(error))])
            raise
        yield found


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield an empty folder of this process, and remove it, also if the process ends first. Raises UsageError."""
    parent = cache_folder(os.environ) / FOLDER
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder, lock = _made(parent)
    except OSError as error:
        fix = "free or allow it, or set XDG_CACHE_HOME to another folder"
        what = f"the code of a revision cannot be written there: {error.strerror}"
        raise UsageError(str(parent), what, fix) from None
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)  # the thread that packs the code may not have ended
    try:
        yield folder
    finally:
        remove()
        atexit.unregister(remove)
        os.close(lock)


def _made(parent: Path) -> tuple[Path, int]:
    """Return a new folder, locked by its descriptor, after those of killed launchers are removed. Raises OSError."""
    turn = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(turn, wait=True)
        for old in parent.iterdir():
            if _lock(opened := os.open(old, os.O_RDONLY | os.O_DIRECTORY)):
                shutil.rmtree(old, ignore_errors=True)
            os.close(opened)
        folder = Path(tempfile.mkdtemp(dir=parent))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        _lock(lock)
        return folder, lock
    finally:
        os.close(turn)


def _lock(descriptor: int, *, wait: bool = False) -> bool:
    """Return whether it could be locked: not while another process has it, nor on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
