"""Checks of a node's GPUs, driver and toolkit, for `launcher doctor` and as warnings of a plan. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from launcher.errors import NodeUnfit
from launcher.job.scalars import Gpus
from launcher.model.facts import Gpu, NodeFacts
from launcher.planning import gpus, rdma
from launcher.planning.checks import Check, Level
from launcher.planning.gpu_faults import fault

NCCL_AND_MIG = (
    "each worker sees its own MIG instance, as CUDA device 0; instances have no peer access and NCCL does not support "
    "two ranks on one GPU, so the workers must use the backend gloo, as `train` does"
)
_PEERS = re.compile(r"^[ \t]*GPU\d+((?:[ \t]+[A-Z]{1,4})+)[ \t]*$", re.MULTILINE)


def of_node(node: NodeFacts, wanted: Gpus, *, isolated: bool) -> Iterator[Check]:
    """Yield the checks of a node's GPUs. wanted: the job's request, or `all` without a job."""
    try:
        chosen = gpus.select(node, wanted)
    except NodeUnfit as error:
        yield Check(node.name, "gpus", Level.FAIL, error.what, error.next_step)
        chosen = ()
    else:
        models = ", ".join(sorted({gpu.name for gpu in node.gpus}))
        count = len(gpus.devices(node))
        what = (f"{len(chosen)} of {count}" if count else "none") + (f": {models}" if models else "")
        yield Check(node.name, "gpus", Level.OK, what)
        problem = fault(node)
        if problem is not None:
            level = Level.OK if wanted == "none" else Level.WARN
            yield Check(node.name, "gpus", level, problem.what, problem.fix)
    if node.gpus and wanted != "none":
        yield from _machine(node)
    if chosen and isolated:
        yield _toolkit(node, chosen)
        if unreadable := gpus.unreadable_cdi(node):
            yield Check(node.name, "cdi", Level.WARN, *unreadable)
        if lost := gpus.lost_at_reload(node):
            what = f"with {lost}, containers lose their GPUs on a systemd reload; containers of runs are not affected"
            fix = "install version 1.18 or later on the node, or use CDI: docs/gpu.md"
            yield Check(node.name, "systemd reload", Level.WARN, what, fix)


def warnings(node: NodeFacts, wanted: Gpus, chosen: Sequence[str]) -> Iterator[str]:
    """Yield warnings about GPUs that `up` uses anyway."""
    problem = fault(node)
    if problem is not None and wanted != "none":
        yield f"{node.name}: {problem.what}; {problem.fix}"
    taken = [device for device in gpus.devices(node) if device.uuid in chosen]
    for line in gpus.in_use(node, taken):
        yield f"{node.name}: {line}"


def differences(nodes: Sequence[NodeFacts]) -> str:
    """Return the differing properties of the nodes' GPUs, with the values of each node; "" if they are alike."""
    found = []
    parts: tuple[tuple[str, Callable[[Gpu], str]], ...] = (
        ("model", lambda gpu: gpu.name),
        ("memory", lambda gpu: f"{round(gpu.memory_mib / 1024)} GiB" if gpu.memory_mib else ""),
        ("driver", lambda gpu: gpu.driver.partition(".")[0]),
        ("compute mode", lambda gpu: gpu.compute_mode),
    )
    with_gpus = [node for node in nodes if node.gpus]
    for name, of in parts:
        values = {node.name: ", ".join(sorted({of(gpu) for gpu in node.gpus})) for node in with_gpus}
        if len(set(values.values())) > 1:
            found.append(f"{name}: " + ", ".join(f"{node} {value or 'unknown'}" for node, value in values.items()))
    return "; ".join(found)


def alike(nodes: Sequence[NodeFacts], *, job: bool) -> list[Check]:
    """Return checks of properties that should be the same on all nodes.

    job: for a job that needs GPUs on each node; `up` refuses a node without GPUs.
    """
    with_gpus = [node for node in nodes if node.gpus]
    without = [node for node in nodes if not node.gpus and fault(node) is None]
    found = []
    if with_gpus and without:
        names = ", ".join(node.name for node in without)
        fix = "remove these nodes from the job, or set gpus: none for them"
        found.append(Check("all", "gpus differ", Level.FAIL if job else Level.WARN, f"no GPU: {names}", fix))
    if differ := differences(nodes):
        found.append(Check("all", "gpus differ", Level.WARN, differ, "the slowest GPU limits the speed"))
    return found


def peers(node: str, printed: str) -> Check | None:
    """Parse `nvidia-smi topo -p2p r`, which has a row for each GPU; None for a single GPU."""
    cells = [cell for row in _PEERS.findall(printed) for cell in row.split() if cell != "X"]
    if not cells:
        return None
    if all(cell == "OK" for cell in cells):
        return Check(node, "peer access", Level.OK, "every GPU can read the memory of every other GPU")
    what = f"{cells.count('OK')} of {len(cells)} pairs of GPUs have peer access; the others copy through host memory"
    fix = "to measure the cost: launcher doctor JOB --bench; to show the topology: nvidia-smi topo -m"
    return Check(node, "peer access", Level.WARN, what, fix)


def _machine(node: NodeFacts) -> Iterator[Check]:
    seen = node.nvidia
    cuda = f", runs CUDA up to {seen.cuda}" if seen.cuda else ""
    yield Check(node.name, "gpu driver", Level.OK, f"{seen.driver}{cuda}")
    if any(gpu.persistence is False for gpu in node.gpus):
        what = "persistence mode is off: the first process on a GPU waits seconds for the driver"
        fix = "sudo systemctl enable --now nvidia-persistenced, or sudo nvidia-smi -pm 1"
        yield Check(node.name, "persistence", Level.WARN, what, fix)
    elif any(gpu.persistence for gpu in node.gpus):
        yield Check(node.name, "persistence", Level.OK, "persistence mode is on")
    if seen.switches and seen.fabric_manager != "active":
        state = seen.fabric_manager or "in an unknown state"
        what = f"the node has {seen.switches} NVSwitches and nvidia-fabricmanager is {state}: "
        what += "CUDA fails with error 802, system not yet initialized"
        fix = "sudo systemctl enable --now nvidia-fabricmanager, in the same version as the driver"
        yield Check(node.name, "fabric manager", Level.FAIL if seen.fabric_manager else Level.WARN, what, fix)
    elif seen.switches:
        yield Check(node.name, "fabric manager", Level.OK, f"active, for {seen.switches} NVSwitches")
    for device_name, instances in ((f"GPU {gpu.index}", gpu.instances) for gpu in node.gpus if gpu.mig):
        listed = ", ".join(f"{each.profile} {each.uuid}" for each in instances) or "no instances"
        yield Check(node.name, "mig", Level.OK, f"{device_name}: {listed}")
    if len(node.gpus) > 1 or node.infiniband:
        yield Check(node.name, "infiniband", Level.OK, "/dev/infiniband exists" if node.infiniband else "none")
    yield from rdma.of_node(node)
    for line in gpus.in_use(node, gpus.devices(node)):
        yield Check(
            node.name,
            "gpu in use",
            Level.WARN,
            line,
            "ask its user, choose other GPUs, or wait with: launcher up --wait",
        )


def _toolkit(node: NodeFacts, chosen: Sequence[str]) -> Check:
    try:
        kind = gpus.driver(node, chosen)
    except NodeUnfit as error:
        return Check(node.name, "container toolkit", Level.FAIL, error.what, error.next_step)
    seen, engine = node.nvidia, node.engine
    parts = [kind]
    parts += [seen.toolkit] if seen.toolkit else []
    parts += [f"mode {seen.toolkit_mode}"] if seen.toolkit_mode else []
    parts += [f"cgroup driver {engine.cgroup}"] if engine is not None and engine.cgroup else []
    parts.append(f"CDI {', '.join(seen.cdi_specs)}" if seen.cdi_specs else "no CDI specification")
    return Check(node.name, "container toolkit", Level.OK, ", ".join(parts))
