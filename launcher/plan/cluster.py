"""The plan of a job for a cluster that chooses the machines: its nodes are alike, and only the cluster knows where they
are. Slurm's script and Kubernetes' manifests are made of it (launcher/export).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.job.models import Job
from launcher.job.problems import Path, Problem, refusal
from launcher.job.scalars import argv_of
from launcher.model.container import Mount
from launcher.model.plan import plain
from launcher.plan.containers import script_in_code

Refused = Iterator[tuple[Path, str]]  # a key of the job file, and why the target cannot carry it


@dataclass(frozen=True)
class ClusterPlan:
    """What every node of the job does. Bytes and seconds."""

    job: str
    nodes: int
    gpus: int  # of each node
    processes: int  # workers of each node
    image: str  # "" for plain processes
    program: tuple[str, ...]  # a worker's argv; of `run.command`, the node's
    torchrun: bool  # False for `run.command`
    env: Mapping[str, str]
    secrets: tuple[str, ...]  # names
    mounts: tuple[Mount, ...]
    output: str  # in the container
    port: int
    restarts: int
    timeout: int | None
    hang_timeout: int | None
    memory: int | None
    cpus: float | None
    ipc: str
    shm: int | None
    cap_add: tuple[str, ...]
    extra_hosts: Mapping[str, str]

    def torchrun_options(self, rank: str, address: str, port: str, run: str) -> tuple[str, ...]:
        """The arguments: what only the cluster knows, as the target writes it. torch 1.10 knows underscores only."""
        options = {
            "nnodes": str(self.nodes),
            "node_rank": rank,
            "nproc_per_node": str(self.processes),
            "master_addr": address,
            "master_port": port,
            "rdzv_backend": "static",
            "rdzv_id": run,
            "max_restarts": "0",
        }
        return tuple(word for name, value in options.items() for word in (f"--{name}", value))

    def bare(self, rank: str, address: str, port: str) -> dict[str, str]:
        """What `run.command` finds in its environment, as on any other node."""
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": port, "RANK": rank}
        return {**meeting, "WORLD_SIZE": str(self.nodes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def build(job: Job, python: str, gpus_of_a_node: int | None = None) -> ClusterPlan:
    """gpus_of_a_node: what `gpus: all` means there. Raises JobInvalid with every key that no cluster can carry."""
    refuse(job, _not_on_a_cluster(job, gpus_of_a_node))
    everything = gpus_of_a_node if job.gpus == "all" else 0 if job.gpus == "none" else job.gpus
    gpus = everything if isinstance(everything, int) else 0
    run, arguments = job.run, argv_of(job.run.args)
    program = ("-m", run.module) if run.module is not None else (script_in_code(job),) if run.script is not None else ()
    base = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "NCCL_DEBUG": "WARN"}
    return ClusterPlan(
        job=job.name,
        nodes=len(job.nodes),
        gpus=gpus,
        processes=max(1, gpus) if job.processes == "auto" else int(job.processes),
        image="" if job.image is None or job.runtime == "process" else job.image.ref or job.image.base or "",
        program=(*run.command, *arguments) if run.command is not None else (python, *program, *arguments),
        torchrun=run.command is None,
        env={**base, **job.env},
        secrets=tuple(secret.name for secret in job.secrets),
        mounts=job.mounts,
        output=job.output,
        port=job.port,
        restarts=job.restarts,
        timeout=job.timeout,
        hang_timeout=job.hang_timeout,
        memory=job.resources.memory,
        cpus=job.resources.cpus,
        ipc=job.docker.ipc,
        shm=job.resources.shm,
        cap_add=job.docker.cap_add,
        extra_hosts=plain(job.docker.extra_hosts),
    )


def refuse(job: Job, problems: Refused) -> None:
    """Raises JobInvalid, each problem with its line, where there is one."""
    found = [Problem(job.mark(path), path, message) for path, message in problems]
    if found:
        raise refusal(found)


def _not_on_a_cluster(job: Job, gpus_of_a_node: int | None) -> Refused:
    for rank, node in enumerate(job.nodes):
        for key in ("gpus", "address", "env"):
            if getattr(node, key):
                yield ("nodes", rank, key), "a cluster chooses the machines, so all nodes are alike: leave it out"
    if isinstance(job.gpus, tuple):
        yield ("gpus",), "a cluster gives GPUs by number: say how many of each node"
    elif job.gpus == "all" and gpus_of_a_node is None:
        what = "how many a node has is not known: say how many (gpus: 8, or none), or set `gpus` of the cluster in"
        yield ("gpus",), f"{what} the settings file and name it: --on CLUSTER"
    if job.min_nodes is not None:
        what = "a cluster has its own way to lose nodes: leave it out, with spares and lost_after; restarts starts anew"
        yield ("min_nodes",), what
    image = job.image
    if image is not None and image.base is not None and job.runtime == "docker":
        for key, changed in (("packages", bool(image.packages)), ("torchvision", image.torchvision != "keep")):
            if changed:
                what = "no image is built or checked on a cluster: build it first (launcher image build), and give it"
                yield (
                    ("image", key),
                    f"{what} as image.ref" + ("; or torchvision: keep" if key == "torchvision" else ""),
                )
    for place, _ in enumerate(job.docker.devices):
        yield ("docker", "devices", place), "a cluster gives no further devices: leave it out"
    if job.run.script is not None and script_in_code(job).startswith(".."):
        yield ("run", "script"), f"lies outside the code folder {job.code}, which is all that the nodes see"
    if job.sweep:
        yield ("sweep",), "a script or manifest is one run: export a variant with --set run.args.KEY=VALUE"
