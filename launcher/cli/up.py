"""`launcher up`: from the job file to connected nodes; launcher.cli.attend has the rest of a run's way."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from launcher.cli import options
from launcher.errors import StoppedByUser, UsageError
from launcher.job.files import check_files, code_folder, read_secrets
from launcher.job.loader import load_job
from launcher.job.models import Job
from launcher.job.sweep import expand_sweep, variant_name
from launcher.model.plan import Membership, RunId, is_run_id, new_run_id
from launcher.node.connect import Fleet, connect
from launcher.node.parallel import in_background

if TYPE_CHECKING:
    from launcher.records.snapshot import Snapshot


def up(
    job: options.JobFile,
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    detach: Annotated[
        bool, typer.Option("-d", "--detach", help="Start it and return; `launcher logs` follows.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Begin with a copy of an earlier run's checkpoints, on the same nodes.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for GPUs that another run has.")] = False,
    ssh_config: options.SshConfig = None,
) -> None:
    """Ctrl-C leaves the run going and says how to come back; a second one stops it.

    Exit codes: 0 done or detached, 1 the job failed, 2 the job file is wrong, 3 a node is unreachable or unfit,
    4 the image, 5 stopped, 6 not every node confirmed.
    """
    loaded = load_job(job, sets or [], options.hosts(nodes))
    earlier = None if resume is None else _earlier(resume)
    if detach and loaded.sweep:
        raise UsageError(
            f"{job}: sweep",
            "its variants run one after another, and with -d nobody would be there to start the next",
            "leave -d out; to go on without a terminal: nohup launcher up JOB &",
        )
    code, group = 0, new_run_id(loaded.name)
    places: list[Membership | None] = [Membership(group, variant_name(variant)) for variant in loaded.sweep]
    for variant, place in zip(expand_sweep(loaded), places or [None], strict=True):
        ended = run_one(variant, options.UpOptions(detach, earlier, wait, place, job), ssh_config)
        code = max(code, ended or 0)
        if ended in (None, StoppedByUser.exit_code):  # the user has left, or does not want the rest either
            break
    sys.exit(code)


def _earlier(text: str) -> RunId:
    """The run that is meant: a whole id needs no record here."""
    if is_run_id(text):
        return text
    from launcher.records.store import find

    return find(text).run


def run_one(job: Job, wishes: options.UpOptions, ssh_config: Path | None) -> int | None:
    """One run of one job; its exit code, None where it was left running."""
    check_files(job, Path.cwd(), os.environ)
    secrets = read_secrets(job, Path.cwd(), os.environ)
    ready = in_background(lambda: _make_ready(job))
    with connect([(entry.name, entry.host) for entry in job.nodes], job.runtime, ssh_config, greet=False) as fleet:
        attend, code = ready()
        return attend(job, fleet, code, secrets, wishes)


class Attend(Protocol):
    """launcher.cli.attend.attend"""

    def __call__(
        self, job: Job, fleet: Fleet, code: Snapshot, secrets: dict[str, str], wishes: options.UpOptions
    ) -> int | None: ...


def _make_ready(job: Job) -> tuple[Attend, Snapshot]:
    """What needs no node, done while they are being connected to: loading the rest of us, packing the code."""
    from launcher.cli.attend import attend
    from launcher.records.snapshot import snapshot

    return attend, snapshot(code_folder(job, Path.cwd()))
