"""A job with a sweep as the jobs it stands for, one a variant of its arguments."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.job.argv import Args, argv_of
from launcher.job.models import Job


def expand_sweep(job: Job) -> list[Job]:
    """One job a variant, in order, without a sweep of its own; the job itself where it has none."""
    if not job.sweep:
        return [job]
    return [
        job.model_copy(update={"sweep": (), "run": job.run.model_copy(update={"args": merged(job.run.args, variant)})})
        for variant in job.sweep
    ]


def merged(args: Args, variant: Args) -> Args:
    """A variant's options replace those of the same name; where either is a list, the variant's follow."""
    if isinstance(args, Mapping) and isinstance(variant, Mapping):
        spelled = {key.replace("_", "-"): key for key in args}
        renamed = {spelled.get(key.replace("_", "-"), key): value for key, value in variant.items()}
        return {**args, **renamed}
    return (*argv_of(args), *argv_of(variant))


def variant_name(variant: Args) -> str:
    """How a variant is called in tables: `batch_size=128 lr=0.1`."""
    if not isinstance(variant, Mapping):
        return " ".join(variant)
    words = {True: "true", False: "false", None: "null"}
    return " ".join(
        f"{key}={','.join(value) if isinstance(value, tuple) else value if isinstance(value, str) else words[value]}"
        for key, value in variant.items()
    )
