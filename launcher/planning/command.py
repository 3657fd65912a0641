"""Command of each node: torchrun with a static rendezvous and the options that the image's torch supports."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import PlanInvalid
from launcher.job.arguments import argv_of
from launcher.job.models import Job
from launcher.job.parts import NodeEntry
from launcher.model.container import Layout
from launcher.model.facts import ImageFacts, Launch
from launcher.model.plan import Rendezvous, RunId
from launcher.planning.rdma import Setting

# Seconds in which ranks save a checkpoint after SIGTERM, read by torchrun since torch 2.13 (before, its limit is 30 s),
# and by container_scripts/torchrun.py. `launcher down` and the time limit kill the container after 45 s.
SAVING = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "40"}


@dataclass(frozen=True)
class Context:
    """Values that all nodes of a run share."""

    job: Job
    run: RunId
    image: ImageFacts
    rendezvous: Rendezvous
    code: str  # digest of the code archive
    owner: str
    created: int
    network: Sequence[Sequence[Setting]] = ()  # what NCCL is told, by node rank; (): nothing
    watched: bool = True  # somebody may answer a breakpoint()


def workers(job: Job, gpus: int) -> int:
    """Return the number of workers of a node: the job's, else one per GPU, or one without GPUs."""
    return max(1, gpus) if job.processes == "auto" else int(job.processes)


def script_in_code(job: Job) -> str:
    """Return the script's path relative to the code folder, the working directory of every process."""
    assert job.run.script is not None
    return posixpath.relpath(posixpath.normpath(job.run.script), posixpath.normpath(job.code))


def program(job: Job, node: NodeEntry | None = None) -> tuple[str, ...]:
    """Return a worker's arguments of Python, ("-m", module, ...) or (script, ...); for `run.command`, its argv.

    node: with its own arguments.
    """
    if job.run.command is not None:
        start = job.run.command
    else:
        start = ("-m", job.run.module) if job.run.module is not None else (script_in_code(job),)
    return (*start, *argv_of(job.run.args if node is None else job.args_of(node)))


def argv(context: Context, layout: Layout, rank: int, processes: int) -> tuple[str, ...]:
    """Return the command of the node with this rank: the launcher's entry script, the image's entrypoint, the program.

    torchrun's own restarts stay at 0: the engine's restart policy is the only mechanism, with one counter. agent.py
    finds the right master after a restart, then calls main() of torchrun.py beside it. Raises PlanInvalid if the image
    lacks the required torch.
    """
    job, image, rendezvous = context.job, context.image, context.rendezvous
    own = program(job, job.machines[rank])
    start = ("sh", f"{layout.kit}/entry.sh", *image.entrypoint)
    if job.run.command is not None:
        elastic = () if job.min_nodes is None else (image.python, f"{layout.kit}/elastic.py", "command")
        return (*start, *elastic, *own)
    require_torch(job, image)
    worker = ("sh", f"{layout.kit}/rank.sh", image.python, *own)
    shape = (len(job.nodes), rank, processes, rendezvous.address, rendezvous.port)
    if image.launch is Launch.LAUNCH:  # torch before 1.9
        # --use_env if supported: scripts then read LOCAL_RANK, as under torchrun, instead of --local_rank.
        known = ("--use_env",) if "use_env" in image.flags else ()
        rest = ("--no_python", *worker) if "no_python" in image.flags else own
        return (*start, image.python, "-m", Launch.LAUNCH.value, *_shape(*shape), *known, *rest)
    if job.min_nodes is not None:
        options: tuple[str, ...] = (f"{layout.kit}/elastic.py", "torchrun")
    else:
        options = (f"{layout.kit}/agent.py", *torchrun_options(*shape, context.run))
    # Without a log_dir, torchrun creates a folder in /tmp and never removes it.
    logs = _options(log_dir=f"{layout.kit}/torchrun") if "log_dir" in image.flags else ()
    return (*start, image.python, *options, *logs, "--no_python", *worker)


def require_torch(job: Job, image: ImageFacts) -> None:
    """Raise PlanInvalid if the image, or the Python of plain processes, lacks the torch that the job needs."""
    if job.run.command is not None:
        return
    where, fix = f"{image.python} in image {image.reference}", "choose a base image with torch, or use run.command"
    if not image.reference:  # plain processes
        where, fix = image.python, "install torch for this Python, or use run.command"
    if image.launch is not Launch.RUN and job.min_nodes is not None:
        raise PlanInvalid(where, "has no torchrun, which min_nodes requires", "remove min_nodes from the job file")
    if image.launch is Launch.NONE:
        what = "has no torch.distributed, which run.module and run.script require"
        raise PlanInvalid(where, what, fix)


def torchrun_options(
    nodes: int, rank: int | str, processes: int, address: str, port: int | str, run: str
) -> tuple[str, ...]:
    """Return torchrun's options; text for values that only the cluster knows. The ID separates runs in one store."""
    static = _options(rdzv_backend="static", rdzv_id=run, max_restarts=0)
    return (*_shape(nodes, rank, processes, address, port), *static)


def _shape(nodes: int, rank: int | str, processes: int, address: str, port: int | str) -> tuple[str, ...]:
    return _options(nnodes=nodes, node_rank=rank, nproc_per_node=processes, master_addr=address, master_port=port)


def variables_without_torchrun(address: str, port: int | str, *, nodes: int, rank: int | str) -> dict[str, str]:
    """Return the environment of `run.command`, for init_process_group("env://") with one process per node."""
    variables = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(nodes)}
    return {**variables, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def _options(**options: str | int) -> tuple[str, ...]:
    """Return options with underscores: torchrun of torch 1.10 accepts nothing else, later versions accept both."""
    return tuple(text for name, value in options.items() for text in (f"--{name}", str(value)))
