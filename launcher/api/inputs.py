"""What a run gets from the caller's machine: the code and the secrets of its job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launcher.errors import UsageError
from launcher.job.files import check_files, read_secrets
from launcher.job.models import Job
from launcher.model.progress import Log
from launcher.node.parallel import Future, in_background
from launcher.records.exported import exported
from launcher.records.masking import hide
from launcher.records.options import notes
from launcher.records.paths import RUNS
from launcher.records.snapshot import CodeListing, Snapshot, list_code, pack
from launcher.records.store import Record
from launcher.records.trainer import check_options
from launcher.run.cluster import Destination


@dataclass(frozen=True)
class Inputs:
    """Inputs of a run from the caller's machine.

    here: the folder of relative paths and of runs/; a program may change to another one meanwhile, as during a sweep.
    code: packed while the nodes connect; `code()` waits for it.
    """

    here: Path
    secrets: Mapping[str, str] = field(repr=False)
    code: Future[Snapshot]
    messages: Sequence[str]  # of packing: not printed by its thread, as nobody waits for it if connecting fails

    @property
    def runs(self) -> Path:
        return self.here / RUNS

    def packed(self, log: Log) -> Snapshot:
        """Wait for the code and report what is sent and what is left out."""
        said, ready = 0, False
        while not ready:
            ready = self.code.wait(1.0)
            for message in self.messages[said:]:
                log(message)
                said += 1
        return self.code()


def inputs_of(job: Job, destination: Destination, log: Log, here: Path | None = None) -> Inputs:
    """Read the inputs of a run. here: the folder of relative paths; None: the working directory.

    Raises JobInvalid like `list_code` and `exported`, and if a file of the job is missing.
    """
    here, messages = here or Path.cwd(), list[str]()
    now = messages.append if destination.may_ask else log
    with ExitStack() as held:
        code = held.enter_context(exported(job, here))
        check_files(job, here, os.environ, code.folder if code else None)
        listing = list_code(job, here, now, bare=destination.bare, exported=code)
        check_options(job, listing.folder, listing.trainer, now)
        for note in notes(job, listing):
            now(f"warning: {note}")
        secrets = read_secrets(job, here, os.environ)
        hide(secrets.values())
        until_packed = held.pop_all()
    return Inputs(here, secrets, in_background(partial(_packed, listing, messages.append, until_packed)), messages)


def inputs_had(job: Job, had: Record, log: Log, here: Path | None = None) -> Inputs:
    """Return the inputs of a run with the code of an earlier one, as it was sent. here: as for `inputs_of`.

    Raises UsageError if that code is not here any more, and as `inputs_of` for secrets.
    """
    here = here or Path.cwd()
    secrets = read_secrets(job, here, os.environ)
    hide(secrets.values())
    try:
        archive = had.code()
    except OSError as error:
        fix = f"repeat the command that started it, without --resume; its code: {had.paths.code}"
        raise UsageError(had.run, f"its code cannot be read: {error.strerror}", fix) from None
    place, left_out = had.left_out()
    code = Snapshot(archive, had.code_digest or "", place, left_out, had.revision)
    log(f"code: that of {had.run}")
    return Inputs(here, secrets, in_background(lambda: code), ())


def _packed(listing: CodeListing, log: Log, held: ExitStack) -> Snapshot:
    with held:
        return pack(listing, log)
