"""Which GPUs each node gives to the run, by UUID: an index means another GPU after a reboot, a UUID does not."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import NodeUnfit
from launcher.job.scalars import Gpus
from launcher.model.facts import NodeFacts


def select(node: NodeFacts, request: Gpus) -> tuple[str, ...]:
    """UUIDs of the GPUs that the request means on this node, in index order.

    `all` on a machine without a GPU is no GPU: the same job file runs on a laptop. Anything that names or counts GPUs
    which are not there raises NodeUnfit.
    """
    known = {gpu.index: gpu.uuid for gpu in sorted(node.gpus, key=lambda gpu: gpu.index)}
    if request == "none":
        return ()
    if request == "all":
        return tuple(known.values())
    if isinstance(request, int):
        if request > len(known):
            raise _lacks(node, f"{request} GPUs are asked for")
        return tuple(known.values())[:request]
    chosen = []
    for wanted in request:
        uuid = known.get(wanted) if isinstance(wanted, int) else wanted
        if uuid is None or uuid not in known.values():
            raise _lacks(node, f"GPU {wanted} is asked for")
        chosen.append(uuid)
    return tuple(chosen)


def driver(node: NodeFacts) -> str:
    """How the node's engine hands GPUs to a container: "nvidia" or "cdi"; raises NodeUnfit where it cannot."""
    engine = node.engine
    if engine is None:
        return ""
    if "nvidia" in engine.runtimes:
        return "nvidia"
    if any(name.startswith("nvidia.com/gpu") for name in engine.cdi_devices):
        return "cdi"
    if engine.kind == "podman":
        what = "has GPUs, but podman's Docker API does not give them to a container"
        raise NodeUnfit(f"node {node.name}", what, "use Docker there, or run without GPUs: gpus: none")
    raise NodeUnfit(
        f"node {node.name}",
        "has GPUs, but its Docker engine cannot give them to a container",
        "install the NVIDIA Container Toolkit there: `sudo nvidia-ctk runtime configure --runtime=docker && "
        "sudo systemctl restart docker`, or run without GPUs: gpus: none",
    )


def share(uuids: Sequence[str], parts: int, place: int) -> tuple[str, ...]:
    """The part of one machine's GPUs that falls to the node at `place` of `parts` on it: as even as can be."""
    size, rest = divmod(len(uuids), parts)
    start = place * size + min(place, rest)
    return tuple(uuids[start : start + size + (1 if place < rest else 0)])


def _lacks(node: NodeFacts, what: str) -> NodeUnfit:
    have = ", ".join(f"{g.index}: {g.name} {g.uuid}" for g in node.gpus) or "none"
    return NodeUnfit(
        f"node {node.name}", f"{what}, it has: {have}", "change `gpus` for this node or choose another node"
    )
