"""Choose the GPUs of each node for a run, by UUID: after a reboot an index may mean another GPU, a UUID does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.errors import InUse, NodeUnfit
from launcher.job.scalars import Gpus, duration
from launcher.model.facts import Gpu, GpuClaim, NodeFacts
from launcher.model.sizes import counted
from launcher.model.version import version_numbers
from launcher.planning.gpu_faults import GpuFault, broken, fault

LITTLE = 1024  # MiB in use on a GPU that still counts as idle: by the driver, by a desktop
WITHOUT = "run without GPUs: gpus: none"
CDI = "nvidia.com/gpu"  # the kind of device in a CDI specification
_OF_THE_DRIVER = ("ctl", "-uvm", "-uvm-tools", "-modeset")
_CDI_0_7 = (1, 19, 1)  # first Container Toolkit that writes CDI 0.7.0: NVIDIA/cloud-native-docs pull request 419
# First engines that surely read it: moby pull request 47706 is of April 2024, after 26.0; containers/common 1944, in
# podman 5.1. podman 4.9.3 does not: nvidia-container-toolkit issues 1860, 1940. Docker before 25 has no CDI at all.
_READS_CDI_0_7 = {"Docker": (27, 0), "podman": (5, 1)}
_KEEPS_GPUS = (1, 18)  # first Container Toolkit that does not change a container's device rules without systemd


@dataclass(frozen=True)
class Device:
    """Device of a worker: a GPU, or an instance of a GPU in MIG mode."""

    uuid: str
    name: str  # for display: "GPU 3", "GPU 3 MIG 1g.10gb"
    gpu: Gpu

    @property
    def instance(self) -> bool:
        return is_instance(self.uuid)


def is_instance(uuid: str) -> bool:
    return uuid.startswith("MIG-")


def devices(node: NodeFacts) -> list[Device]:
    """Return the usable devices, in index order."""
    found = []
    for gpu in sorted(node.gpus, key=lambda gpu: gpu.index):
        if broken(gpu):
            continue
        name = f"GPU {gpu.index}"
        if gpu.mig:
            found += [Device(each.uuid, f"{name} MIG {each.profile}", gpu) for each in gpu.instances]
        else:
            found.append(Device(gpu.uuid, name, gpu))
    return found


def select(node: NodeFacts, request: Gpus) -> tuple[str, ...]:
    """Return the UUIDs of the devices that the request selects on this node, in index order.

    `all` selects no GPU on a machine without GPUs: the same job file runs on a laptop. A number selects idle GPUs;
    raises InUse with the users of the others. Raises NodeUnfit for GPUs that do not exist or cannot be used.
    """
    if request == "none":
        return ()
    problem = fault(node)
    if problem is not None and (not problem.partial or (request == "all" and not problem.complete)):
        raise _faulty(node, problem)
    found = devices(node)
    if request == "all":
        if node.gpus and not found:
            fix = f"create instances on the node (sudo nvidia-smi mig -cgi PROFILE -C), disable MIG mode, or {WITHOUT}"
            raise NodeUnfit(f"node {node.name}", "its GPUs are in MIG mode and have no instances", fix)
        return tuple(device.uuid for device in found)
    if isinstance(request, int):
        return _idle(node, request, found, problem)
    known = {device.uuid: device.uuid for device in found}
    by_index = {device.gpu.index: device.uuid for device in found if not device.instance}
    chosen = []
    for wanted in request:
        if problem is not None and problem.missing and isinstance(wanted, int):
            raise _faulty(node, problem, "; indices count only the listed GPUs, so name GPUs by their UUID")
        uuid = by_index.get(wanted) if isinstance(wanted, int) else known.get(wanted)
        if uuid is None:
            raise _lacks(node, f"GPU {wanted} is requested", problem)
        chosen.append(uuid)
    return tuple(chosen)


def only_used(node: NodeFacts, request: Gpus) -> NodeFacts:
    """Return the node without the GPUs that the request does not select; with all if it cannot be satisfied."""
    try:
        chosen = select(node, request)
    except NodeUnfit:  # said where GPUs are chosen
        return node
    used = {device.gpu.uuid for device in devices(node) if device.uuid in chosen}
    return replace(node, gpus=tuple(gpu for gpu in node.gpus if gpu.uuid in used))


def _idle(node: NodeFacts, count: int, found: Sequence[Device], problem: GpuFault | None) -> tuple[str, ...]:
    requested = f"{counted(count, 'GPU')} requested"
    if count > len(found):
        raise _lacks(node, requested, problem)
    idle = [device.uuid for device in found if not user(node, device)]
    if len(idle) < count:
        what = f"{requested}, {len(idle)} of {len(found)} are idle: {'; '.join(in_use(node, found))}"
        fix = "wait for them: --wait; name GPUs that no run holds to share them: gpus: [0, 1]; or choose another node"
        runs = {claim.run for claim in node.claims if claim.uuid in {device.uuid for device in found}}
        raise InUse(f"node {node.name}", what, fix, tuple(sorted(runs)))
    return tuple(idle[:count])


def in_use(node: NodeFacts, among: Sequence[Device]) -> list[str]:
    """Describe each of these devices that is in use: `GPU 0: 59.6 GiB by erin, python3 (pid 4242) for 3:00:00`."""
    return [f"{device.name}: {who}" for device in among if (who := user(node, device))]


def user(node: NodeFacts, device: Device) -> str:
    """Return who uses the device, how much of its memory and for how long; "" if it is idle.

    The MIG instance of a process is not known, so none of the instances of a GPU with processes counts as idle.
    """
    gpu = device.gpu
    claims = [claim for claim in node.claims if claim.uuid == device.uuid]
    found = [f"the run {_shown(claim)} of {claim.owner} for {duration(claim.age)}" for claim in claims]
    for process in () if claims else gpu.processes:
        who = f"{process.memory_mib / 1024:.1f} GiB by {process.user or 'an unknown user'}"
        age = f" for {duration(process.age)}" if process.age else ""
        found.append(f"{who}, {process.name or 'a process'} (pid {process.pid}){age}")
    if not found and gpu.used_mib >= LITTLE and not device.instance and not gpu.shared:
        found.append(f"{gpu.used_mib / 1024:.1f} GiB by processes that are not visible")
    return ", ".join(found)


def _shown(claim: GpuClaim) -> str:
    return f"{claim.run} ({claim.variant})" if claim.variant else claim.run


def driver(node: NodeFacts, uuids: Sequence[str]) -> str:
    """Return how the engine passes these GPUs to a container: "cdi", else "nvidia". Raises NodeUnfit if it cannot.

    CDI is preferred: the engine creates the device files, so that systemd does not revoke them (see device_files).
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
        fix = "sudo nvidia-ctk cdi generate --device-name-strategy=uuid --output=/etc/cdi/nvidia.yaml"
        raise NodeUnfit(f"node {node.name}", what, f"on the node: {fix}")
    if engine.kind == "podman":
        what = "has GPUs, but podman's Docker API cannot pass them to a container"
        raise NodeUnfit(f"node {node.name}", what, f"use Docker on the node, or {WITHOUT}")
    if unreadable := unreadable_cdi(node):
        raise NodeUnfit(f"node {node.name}", f"has GPUs, but {unreadable[0]}", unreadable[1])
    raise NodeUnfit(
        f"node {node.name}",
        "has GPUs, but its Docker engine cannot pass them to a container",
        "install the NVIDIA Container Toolkit on the node: `sudo nvidia-ctk runtime configure --runtime=docker && "
        f"sudo systemctl restart docker`, or {WITHOUT}",
    )


def device_files(node: NodeFacts, uuids: Sequence[str]) -> tuple[str, ...]:
    """Return the device files of these GPUs and of their driver, to pass in addition to the NVIDIA runtime's request.

    The runtime adds device files that systemd does not know: when systemd reloads its units, it denies access to them,
    and the container loses its GPUs (NVIDIA/nvidia-container-toolkit issue 48).
    """
    chosen = [gpu for gpu in node.gpus if {gpu.uuid, *(instance.uuid for instance in gpu.instances)} & set(uuids)]
    wanted = [f"/dev/nvidia{gpu.minor}" for gpu in chosen] + [f"/dev/nvidia{name}" for name in _OF_THE_DRIVER]
    for gpu in chosen:  # the owner of each file is not known, and CUDA uses the first instance that it can open
        if {instance.uuid for instance in gpu.instances} <= set(uuids):
            wanted += gpu.instance_files
    return tuple(file for file in wanted if file in node.nvidia.device_files)


def unreadable_cdi(node: NodeFacts) -> tuple[str, str] | None:
    """Return that the engine may not read the Container Toolkit's CDI specification, and the fix; None if it does."""
    engine, toolkit = node.engine, node.nvidia.toolkit
    if engine is None or not node.nvidia.cdi_specs or version_numbers(toolkit) < _CDI_0_7:
        return None
    first, has = _READS_CDI_0_7[engine.kind], version_numbers(engine.version)
    if not has or has >= first or (engine.kind == "Docker" and has < (25,)):
        return None
    newer = f"{engine.kind} {'.'.join(map(str, first))}"
    what = f"{engine.kind} {engine.version} may not read the CDI 0.7.0 that Container Toolkit {toolkit} writes"
    older = "install Container Toolkit 1.19.0, and generate the specification again"
    return what, f"update to {newer} or newer; or on the node: {older}"


def lost_at_reload(node: NodeFacts) -> str:
    """Return the toolkit with which containers lose their GPUs when systemd reloads; "" if they keep them."""
    toolkit, engine = node.nvidia.toolkit, node.engine
    if engine is None or engine.cgroup != "systemd" or node.nvidia.toolkit_mode == "cdi":
        return ""
    return f"NVIDIA Container Toolkit {toolkit}" if toolkit and version_numbers(toolkit)[:2] < _KEEPS_GPUS else ""


def share(uuids: Sequence[str], parts: int, index: int) -> tuple[str, ...]:
    """Split one machine's GPUs evenly among `parts` nodes on it, and return those of the node with this index."""
    size, rest = divmod(len(uuids), parts)
    start = index * size + min(index, rest)
    return tuple(uuids[start : start + size + (1 if index < rest else 0)])


def has_none(node: NodeFacts) -> NodeUnfit:
    """Return the error for a node without GPUs in a job with GPUs on other nodes."""
    fix = "remove the node, or use its CPUs: nodes: [{host: " + node.host + ", gpus: none}]"
    return NodeUnfit(f"node {node.name}", "it has no GPU, but other nodes of the job do", fix)


def _faulty(node: NodeFacts, problem: GpuFault, more: str = "") -> NodeUnfit:
    what, others = "its GPUs cannot be used", ""
    if problem.partial and (left := len(devices(node))):
        what, others = "not all of its GPUs can be used", f"; or use the working ones: gpus: {left}"
    return NodeUnfit(f"node {node.name}", f"{what}: {problem.what}", f"{problem.fix}{others}; or {WITHOUT}{more}")


def _lacks(node: NodeFacts, what: str, problem: GpuFault | None) -> NodeUnfit:
    have = ", ".join(f"{d.gpu.index}: {d.gpu.name if not d.instance else d.name} {d.uuid}" for d in devices(node))
    what = f"{what}, but the node has: {have or 'none'}"
    if problem is not None:
        return NodeUnfit(f"node {node.name}", f"{what}; {problem.what}", problem.fix)
    divided = [str(gpu.index) for gpu in node.gpus if gpu.mig]
    fix = f"; GPU {', '.join(divided)} is in MIG mode: name its instances by UUID" if divided else ""
    return NodeUnfit(f"node {node.name}", what, f"change `gpus` for this node or choose another node{fix}")
