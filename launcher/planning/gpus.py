"""Which GPUs each node gives to the run, by UUID: an index means another GPU after a reboot, a UUID does not."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import NodeUnfit
from launcher.job.scalars import Gpus
from launcher.model.facts import NodeFacts

CDI = "nvidia.com/gpu"  # the kind of device in a CDI specification
_OF_THE_DRIVER = ("ctl", "-uvm", "-uvm-tools", "-modeset")
_KEEPS_GPUS = (1, 18)  # the first Container Toolkit that does not change a container's device rules behind systemd


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


def driver(node: NodeFacts, uuids: Sequence[str]) -> str:
    """How the node's engine hands these GPUs to a container: "cdi", else "nvidia"; raises NodeUnfit where it cannot.

    CDI first: the engine itself creates the device files, so that systemd does not take them away (see device_files).
    """
    engine = node.engine
    if engine is None:
        return ""
    if uuids and all(f"{CDI}={uuid}" in engine.cdi_devices for uuid in uuids):
        return "cdi"
    if "nvidia" in engine.runtimes:
        return "nvidia"
    if any(name.startswith(CDI) for name in engine.cdi_devices):
        what = "has GPUs, but its CDI specification does not name them by UUID"
        cure = "sudo nvidia-ctk cdi generate --device-name-strategy=uuid --output=/etc/cdi/nvidia.yaml"
        raise NodeUnfit(f"node {node.name}", what, f"on the node: {cure}")
    if engine.kind == "podman":
        what = "has GPUs, but podman's Docker API does not give them to a container"
        raise NodeUnfit(f"node {node.name}", what, "use Docker there, or run without GPUs: gpus: none")
    raise NodeUnfit(
        f"node {node.name}",
        "has GPUs, but its Docker engine cannot give them to a container",
        "install the NVIDIA Container Toolkit there: `sudo nvidia-ctk runtime configure --runtime=docker && "
        "sudo systemctl restart docker`, or run without GPUs: gpus: none",
    )


def device_files(node: NodeFacts, uuids: Sequence[str]) -> tuple[str, ...]:
    """Of these GPUs and of their driver, to be passed beside a request to the NVIDIA runtime.

    That gives a container device files of which systemd does not know: when systemd reloads its units, it forbids them,
    and the container has lost its GPUs (NVIDIA/nvidia-container-toolkit issue 48).
    """
    chosen = [gpu for gpu in node.gpus if {gpu.uuid, *(instance.uuid for instance in gpu.instances)} & set(uuids)]
    wanted = [f"/dev/nvidia{gpu.minor}" for gpu in chosen] + [f"/dev/nvidia{name}" for name in _OF_THE_DRIVER]
    return tuple(file for file in wanted if file in node.nvidia.device_files)


def lost_at_reload(node: NodeFacts) -> str:
    """The toolkit that gives containers GPUs which they lose when systemd reloads; "" where none does."""
    toolkit, engine = node.nvidia.toolkit, node.engine
    if engine is None or engine.cgroup != "systemd" or node.nvidia.toolkit_mode == "cdi":
        return ""
    numbers = tuple(map(int, toolkit.split(".")[:2])) if toolkit else ()
    return f"NVIDIA Container Toolkit {toolkit}" if numbers and numbers < _KEEPS_GPUS else ""


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
