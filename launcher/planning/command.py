"""The command of each node: torchrun with a static rendezvous, with the options of the image's torch."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from launcher.errors import PlanInvalid
from launcher.job.models import Job
from launcher.job.scalars import argv_of
from launcher.model.container import Layout
from launcher.model.facts import ImageFacts, Launch
from launcher.model.plan import Rendezvous, RunId


@dataclass(frozen=True)
class Context:
    """What all nodes of one run share."""

    job: Job
    run: RunId
    image: ImageFacts
    rendezvous: Rendezvous
    code: str  # digest of the code archive
    owner: str
    created: int


def workers(job: Job, gpus: int) -> int:
    """How many workers a node with so many GPUs runs: what the job says, else one a GPU, one without."""
    return max(1, gpus) if job.processes == "auto" else int(job.processes)


def script_in_code(job: Job) -> str:
    """The script's path from the code folder, which is the working directory of every process."""
    assert job.run.script is not None
    return posixpath.relpath(posixpath.normpath(job.run.script), posixpath.normpath(job.code))


def program(job: Job) -> tuple[str, ...]:
    """What each worker gives to Python, ("-m", module, ...) or (script, ...); of `run.command`, the node's argv."""
    if job.run.command is not None:
        start = job.run.command
    else:
        start = ("-m", job.run.module) if job.run.module is not None else (script_in_code(job),)
    return (*start, *argv_of(job.run.args))


def argv(context: Context, layout: Layout, rank: int, processes: int) -> tuple[str, ...]:
    """The whole command of the node of this rank: our entry script, the image's own entrypoint, the program.

    The restarts of torchrun stay at 0: there is one mechanism, the engine's restart policy, and one counter. agent.py
    calls torchrun and finds the right master after a restart. Raises PlanInvalid where the image has no such torch.
    """
    job, image, meeting = context.job, context.image, context.rendezvous
    start = ("sh", f"{layout.kit}/entry.sh", *image.entrypoint)
    if job.run.command is not None:
        elastic = () if job.min_nodes is None else (image.python, f"{layout.kit}/elastic.py", "command")
        return (*start, *elastic, *program(job))
    _refuse_without_torch(job, image)
    worker = ("sh", f"{layout.kit}/rank.sh", image.python, *program(job))
    place = (len(job.nodes), rank, processes, meeting.address, meeting.port)
    if image.launch is Launch.LAUNCH:  # torch before 1.9
        # --use_env where it is known: scripts read LOCAL_RANK, as under torchrun, not --local_rank.
        known = ("--use_env",) if "use_env" in image.flags else ()
        rest = ("--no_python", *worker) if "no_python" in image.flags else program(job)
        return (*start, image.python, "-m", Launch.LAUNCH.value, *_shape(*place), *known, *rest)
    if job.min_nodes is not None:
        options: tuple[str, ...] = (f"{layout.kit}/elastic.py", "torchrun")
    else:
        options = (f"{layout.kit}/agent.py", *torchrun_options(*place, context.run))
    # Without a log_dir torchrun makes a folder in /tmp and never removes it.
    logs = _options(log_dir=f"{layout.kit}/torchrun") if "log_dir" in image.flags else ()
    return (*start, image.python, *options, *logs, "--no_python", *worker)


def _refuse_without_torch(job: Job, image: ImageFacts) -> None:
    where = f"image {image.reference}"
    if image.launch is not Launch.RUN and job.min_nodes is not None:
        raise PlanInvalid(where, "has no torchrun, which min_nodes needs", "leave min_nodes out")
    if image.launch is Launch.NONE:
        what = "has no torch.distributed, which run.module and run.script need"
        raise PlanInvalid(where, what, "choose a base image with torch, or use run.command")


def torchrun_options(
    nodes: int, rank: int | str, processes: int, address: str, port: int | str, run: str
) -> tuple[str, ...]:
    """torchrun's own options, as text where only a cluster knows the value. The id keeps runs apart in one store."""
    static = _options(rdzv_backend="static", rdzv_id=run, max_restarts=0)
    return (*_shape(nodes, rank, processes, address, port), *static)


def _shape(nodes: int, rank: int | str, processes: int, address: str, port: int | str) -> tuple[str, ...]:
    return _options(nnodes=nodes, node_rank=rank, nproc_per_node=processes, master_addr=address, master_port=port)


def bare(address: str, port: int | str, *, nodes: int, rank: int | str) -> dict[str, str]:
    """What `run.command` finds in its environment: enough for init_process_group("env://") with one process a node."""
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(nodes)}
    return {**meeting, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def _options(**options: str | int) -> tuple[str, ...]:
    """With underscores: torchrun of torch 1.10 accepts nothing else, later ones accept both."""
    return tuple(word for name, value in options.items() for word in (f"--{name}", str(value)))
