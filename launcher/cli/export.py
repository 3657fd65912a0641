"""`launcher export`: the job as an sbatch script or as Kubernetes manifests, printed."""

from __future__ import annotations

import os
from enum import Enum
from typing import Annotated

import typer

from launcher.cli import options
from launcher.errors import UsageError
from launcher.job.loader import load_job
from launcher.job.settings import read_settings
from launcher.plan.cluster import build


class Target(str, Enum):
    """What a job is exported to."""

    SLURM = "slurm"
    JOBSET = "jobset"
    JOB = "job"


def export(
    job: options.JobFile,
    to: Annotated[Target, typer.Option("--to", help="slurm: an sbatch script; jobset, job: Kubernetes manifests.")],
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="CLUSTER", help="slurm: with this cluster's settings."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option("--image", help="Kubernetes: the pushed image, with the code at /workspace/code."),
    ] = None,
) -> None:
    """Nothing is touched. What the target cannot carry is refused with its line in the job file."""
    loaded = load_job(job, sets or [], options.hosts(nodes))
    if to is Target.SLURM:
        from launcher.export import slurm

        cluster = slurm.ANY if on is None else read_settings(os.environ).cluster(on)
        slurm.check(loaded, cluster.container)
        typer.echo(slurm.render(build(loaded, cluster.python, cluster.gpus), cluster), nl=False)
        return
    if on is not None:
        raise UsageError("--on", "is for --to slurm", "leave it out")
    from launcher.export import kubernetes

    kubernetes.check(loaded, jobset=to is Target.JOBSET, image=image)
    plan = build(loaded, "python3")
    made = (kubernetes.jobset if to is Target.JOBSET else kubernetes.indexed_job)(plan, image or "")
    typer.echo(kubernetes.text(plan, made), nl=False)
