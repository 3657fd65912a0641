"""Plan of a job for a cluster, which chooses the machines: all nodes are alike, and their addresses are not known.

A target of `launcher export` renders it as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.job.models import Job
from launcher.job.problems import Path
from launcher.planning import checks, command

Refused = Iterator[tuple[Path, str]]  # a key of the job file, and why the target does not support it
REFUSED = (  # by build()
    "nodes.gpus nodes.address nodes.env nodes.args min_nodes spares lost_after data docker.devices sweep codes each"
)


@dataclass(frozen=True)
class ClusterPlan:
    """Settings of every node of the job."""

    job: Job
    gpus: int  # of each node
    processes: int  # workers of each node
    image: str  # "" for plain processes
    program: tuple[str, ...]  # argv of a worker, or of the node for `run.command`
    env: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        return len(self.job.nodes)

    @property
    def torchrun(self) -> bool:
        """False for `run.command`."""
        return self.job.run.command is None


def build(job: Job, python: str, gpus_of_a_node: int | None = None) -> ClusterPlan:
    """Return the plan. gpus_of_a_node: meaning of `gpus: all`. Raises JobInvalid with all unsupported keys."""
    job.refuse(_not_on_a_cluster(job, gpus_of_a_node))
    everything = gpus_of_a_node if job.gpus == "all" else job.gpus
    unknown = "no GPUs are requested: the settings file lacks the number of GPUs of a node of the cluster (`gpus`)"
    gpus = everything if isinstance(everything, int) else 0
    program = command.program(job)
    base = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "NCCL_DEBUG": "WARN"}
    return ClusterPlan(
        job=job,
        gpus=gpus,
        processes=command.workers(job, gpus),
        image="" if job.image is None or not job.traits.has_images else job.image.ref or job.image.base or "",
        program=program if job.run.command is not None else (python, *program),
        env={**base, **job.env},
        warnings=(*checks.written(job), *([unknown] if everything is None else [])),
    )


def _not_on_a_cluster(job: Job, gpus_of_a_node: int | None) -> Refused:
    for rank, node in enumerate(job.nodes):
        for key in ("gpus", "address", "env", "args"):
            if getattr(node, key):
                yield (
                    ("nodes", rank, key),
                    "a cluster chooses the machines, so all nodes have the same settings: remove it",
                )
    if isinstance(job.gpus, tuple):
        yield ("gpus",), "a cluster allocates GPUs by number: give the number of GPUs per node"
    elif job.gpus == "all" and gpus_of_a_node is None and (job.traits.isolates or "gpus" in job.model_fields_set):
        what = "the number of GPUs of a node is unknown: give it (gpus: 8, or none), or set `gpus` of the cluster in"
        yield ("gpus",), f"{what} the settings file and name the cluster: --on CLUSTER"
    if job.min_nodes is not None:
        what = "is not supported on a cluster: remove it, with spares and lost_after; `restarts` restarts the job"
        yield ("min_nodes",), what
    for data in job.data:
        what = (
            "the nodes of a cluster share a file system: put the data there, and use mounts: {/shared/data: /data:ro}"
        )
        yield ("data", data.name), what
    for index, _ in enumerate(job.docker.devices):
        yield ("docker", "devices", index), "additional devices are not supported on a cluster: remove it"
    for mount in job.mounts:
        if mount.source.startswith("~"):
            yield ("mounts", mount.source), "the home on a cluster is not known here: give the absolute path"
    if job.run.script is not None and command.script_in_code(job).startswith(".."):
        yield ("run", "script"), f"is outside the code folder {job.code}, and the nodes see only that folder"
    if job.sweep:
        pool = "" if job.each is None else f"--set nodes={job.each} "  # a pool is nothing without its sweep
        only = f"{pool}--set sweep=null --set run.args.KEY=VALUE"
        code = "check out its code, then " * bool(job.codes)
        yield ("sweep",), f"a script or manifest is a single run: to export a variant, {code}use {only}"
