"""The command of each node: torchrun with a static rendezvous, with the options of the image's torch."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import PlanInvalid
from launcher.model.container import Layout
from launcher.model.facts import ImageFacts, Launch
from launcher.model.plan import Rendezvous, RunId


def entry(layout: Layout, image: ImageFacts, command: Sequence[str]) -> tuple[str, ...]:
    """The argv of a container: our entry script, then the image's own entrypoint, then the command."""
    return ("sh", f"{layout.kit}/entry.sh", *image.entrypoint, *command)


def distributed(
    image: ImageFacts,
    layout: Layout,
    rendezvous: Rendezvous,
    *,
    run: RunId,
    nodes: int,
    rank: int,
    processes: int,
    program: Sequence[str],
) -> tuple[str, ...]:
    """The argv that starts `processes` workers on the node of this rank; `program` is ("-m", module, ...) or a script.

    Flags are spelled with underscores: torchrun of torch 1.10 accepts nothing else, later ones accept both. The
    restarts of torchrun stay at 0: there is one mechanism, the engine's restart policy, and one counter. agent.py calls
    torchrun and finds the right master after a restart.
    Raises PlanInvalid where the image has no torch.
    """
    if image.launch is Launch.NONE:
        raise PlanInvalid(
            f"image {image.reference}",
            "has no torch.distributed, which run.module and run.script need",
            "choose a base image with torch, or use run.command",
        )
    shape = _options(
        nnodes=nodes,
        node_rank=rank,
        nproc_per_node=processes,
        master_addr=rendezvous.address,
        master_port=rendezvous.port,
    )
    if image.launch is Launch.LAUNCH:
        return _before_torchrun(image, layout, shape, program)
    static = _options(rdzv_backend="static", rdzv_id=run, max_restarts=0)  # the id keeps runs apart in one store
    if "log_dir" in image.flags:
        # Without it torchrun makes a folder in /tmp and never removes it.
        static += _options(log_dir=f"{layout.kit}/torchrun")
    worker = ("sh", f"{layout.kit}/rank.sh", image.python, *program)
    return (image.python, f"{layout.kit}/agent.py", *shape, *static, "--no_python", *worker)


def _before_torchrun(
    image: ImageFacts, layout: Layout, shape: Sequence[str], program: Sequence[str]
) -> tuple[str, ...]:
    """torch before 1.9. `--use_env` where it is known: scripts read LOCAL_RANK, as under torchrun, not --local_rank."""
    start = [image.python, "-m", Launch.LAUNCH.value, *shape]
    if "use_env" in image.flags:
        start.append("--use_env")
    if "no_python" in image.flags:
        return (*start, "--no_python", "sh", f"{layout.kit}/rank.sh", image.python, *program)
    return (*start, *program)


def elastic(image: ImageFacts, layout: Layout, kind: str, program: Sequence[str]) -> tuple[str, ...]:
    """The argv of a node of a job with min_nodes; kind: torchrun | command.

    Raises PlanInvalid where the image has no torchrun that it needs.
    """
    start = (image.python, f"{layout.kit}/elastic.py", kind)
    if kind == "command":
        return (*start, *program)
    if image.launch is Launch.NONE or image.launch is Launch.LAUNCH:
        raise PlanInvalid(f"image {image.reference}", "has no torchrun, which min_nodes needs", "leave min_nodes out")
    logs = _options(log_dir=f"{layout.kit}/torchrun") if "log_dir" in image.flags else ()
    return (*start, *logs, "--no_python", "sh", f"{layout.kit}/rank.sh", image.python, *program)


def bare(rendezvous: Rendezvous, *, nodes: int, rank: int) -> dict[str, str]:
    """What `run.command` finds in its environment: enough for init_process_group("env://") with one process a node."""
    return {
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        "WORLD_SIZE": str(nodes),
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


def _options(**options: str | int) -> tuple[str, ...]:
    return tuple(word for name, value in options.items() for word in (f"--{name}", str(value)))
