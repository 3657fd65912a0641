"""The plan of a job for a cluster that chooses the machines: its nodes are alike, and only the cluster knows where they
are. Slurm's script and Kubernetes' manifests are made of it (launcher/export).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.job.models import Job
from launcher.job.problems import Path
from launcher.planning import command

Refused = Iterator[tuple[Path, str]]  # a key of the job file, and why the target cannot carry it


@dataclass(frozen=True)
class ClusterPlan:
    """What every node of the job does."""

    job: Job
    gpus: int  # of each node
    processes: int  # workers of each node
    image: str  # "" for plain processes
    program: tuple[str, ...]  # a worker's argv; of `run.command`, the node's
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
    """gpus_of_a_node: what `gpus: all` means there. Raises JobInvalid with every key that no cluster can carry."""
    job.refuse(_not_on_a_cluster(job, gpus_of_a_node))
    everything = gpus_of_a_node if job.gpus == "all" else job.gpus
    unknown = "no GPUs are asked for: the settings file does not say how many a node of the cluster has (`gpus`)"
    gpus = everything if isinstance(everything, int) else 0
    program = command.program(job)
    base = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "NCCL_DEBUG": "WARN"}
    return ClusterPlan(
        job=job,
        gpus=gpus,
        processes=command.workers(job, gpus),
        image="" if job.image is None or job.runtime == "process" else job.image.ref or job.image.base or "",
        program=program if job.run.command is not None else (python, *program),
        env={**base, **job.env},
        warnings=(unknown,) if everything is None else (),
    )


def _not_on_a_cluster(job: Job, gpus_of_a_node: int | None) -> Refused:
    for rank, node in enumerate(job.nodes):
        for key in ("gpus", "address", "env"):
            if getattr(node, key):
                yield ("nodes", rank, key), "a cluster chooses the machines, so all nodes are alike: leave it out"
    if isinstance(job.gpus, tuple):
        yield ("gpus",), "a cluster gives GPUs by number: say how many of each node"
    elif job.gpus == "all" and gpus_of_a_node is None and (job.runtime == "docker" or "gpus" in job.model_fields_set):
        what = "how many a node has is not known: say how many (gpus: 8, or none), or set `gpus` of the cluster in"
        yield ("gpus",), f"{what} the settings file and name it: --on CLUSTER"
    if job.min_nodes is not None:
        what = "a cluster has its own way to lose nodes: leave it out, with spares and lost_after; restarts starts anew"
        yield ("min_nodes",), what
    for data in job.data:
        what = "the nodes of a cluster share a file system: put it there, and use mounts: {/shared/data: /data:ro}"
        yield ("data", data.name), what
    image = job.image
    if image is not None and image.base is not None and job.runtime == "docker":
        what = "no image is built or checked on a cluster: build it first (launcher image build), and give it"
        if image.packages:
            yield ("image", "packages"), f"{what} as image.ref"
        if image.torchvision != "keep":
            yield ("image", "torchvision"), f"{what} as image.ref; or torchvision: keep"
    for place, _ in enumerate(job.docker.devices):
        yield ("docker", "devices", place), "a cluster gives no further devices: leave it out"
    if job.run.script is not None and command.script_in_code(job).startswith(".."):
        yield ("run", "script"), f"lies outside the code folder {job.code}, which is all that the nodes see"
    if job.sweep:
        yield ("sweep",), "a script or manifest is one run: export a variant with --set run.args.KEY=VALUE"
