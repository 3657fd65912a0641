"""`launcher export`: the job as an sbatch script or as Kubernetes manifests, printed."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from launcher.cli import options
from launcher.errors import UsageError
from launcher.job.loader import load_job
from launcher.job.settings import read_settings
from launcher.plan.cluster import build


def export(
    job: options.JobFile,
    to: Annotated[
        Literal["slurm", "jobset", "job"],
        typer.Option("--to", help="slurm: an sbatch script; jobset, job: Kubernetes manifests."),
    ],
    sets: options.Sets = None,
    nodes: options.JobNodes = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="CLUSTER", help="slurm: with this cluster's settings.")
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Kubernetes: the pushed image, with the code at /workspace/code.")
    ] = None,
) -> None:
    """Nothing is touched. What the target cannot carry is refused with its line in the job file."""
    loaded = load_job(job, sets or [], options.hosts(nodes))
    if to == "slurm":
        from launcher.export import slurm

        cluster = slurm.ANY if on is None else read_settings(os.environ).cluster(on)
        slurm.check(loaded, cluster.container)
        typer.echo(slurm.render(build(loaded, cluster.python, cluster.gpus), cluster), nl=False)
        return
    if on is not None:
        raise UsageError("--on", "is for --to slurm", "leave it out")
    from launcher.export import kubernetes

    kubernetes.check(loaded, jobset=to == "jobset", image=image)
    plan = build(loaded, "python3")
    made = (kubernetes.jobset if to == "jobset" else kubernetes.indexed_job)(plan, image or "")
    typer.echo(kubernetes.text(plan, made), nl=False)
