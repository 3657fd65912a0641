"""The options of `launcher up` for sweeps. Jobs that are none load nothing else of this feature."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.api.until_started import until_started
from launcher.cli import completion
from launcher.cli.up import Asked
from launcher.errors import UsageError
from launcher.job.models import Job


def options(
    job: Job,
    asked: Asked,
    *,
    most: Annotated[
        int | None, typer.Option("--max-parallel", metavar="N", min=1, help="Run at most N variants in parallel.")
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP", autocompletion=completion.runs, help="Run the job once, as one more variant of this sweep."
        ),
    ] = None,
) -> int | None:
    """The variants of a sweep run one after another, or in parallel on a pool of
    machines; --resume GROUP runs those without a result. --into GROUP adds a
    variant, which is named after its --set, on a free machine of the job's pool.
    """
    if into is not None:
        if most is not None:
            raise UsageError("--max-parallel", "excludes --into, which runs one variant", "omit one of them")
        with until_started():
            from launcher.features.sweeps.into import up_into
        return up_into(job, asked, into)
    if not job.sweep:
        return None
    with until_started():
        from launcher.features.sweeps.up import up_sweep
    return up_sweep(job, asked, most)
