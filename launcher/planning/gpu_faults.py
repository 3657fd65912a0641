"""Why GPUs that a machine has cannot be used, as nvidia-smi reports it, and the fix. Pure.

A machine without a GPU has none on its PCI bus, no /dev/nvidia0 and no nvidia-smi. Everything else that keeps a GPU
from being used is a fault, and never "no GPU".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.model.facts import Gpu, NodeFacts, PciGpu

_LOOK = "`sudo dmesg | grep -iE 'nvrm|xid'` there says why"
_INSTALL = "install NVIDIA's driver there (on Ubuntu: sudo ubuntu-drivers install --gpgpu) and reboot it"
_LOST = f"reboot it; {_LOOK}. If it comes back, check the GPU's power, cooling and seat"
# what nvidia-smi says: what that means, and the fix
_SAID = (
    (
        "Driver/library version mismatch",
        "the driver was upgraded and its old kernel module is still loaded",
        "reboot it, or stop what uses the GPUs and reload the modules: sudo rmmod nvidia_drm nvidia_modeset nvidia_uvm "
        "nvidia && sudo modprobe nvidia",
    ),
    (
        "couldn't communicate with the NVIDIA driver",
        "the driver's kernel module is not loaded",
        f"sudo modprobe nvidia; after an upgrade of the kernel install the driver again and reboot; {_LOOK}",
    ),
    (
        "couldn't find libnvidia-ml|NVML: (Shared )?Library Not Found|NVML Shared Library",
        "the driver's libraries are not installed",
        _INSTALL,
    ),
    ("GPU is lost|fallen off the bus|Unable to determine the device handle", "a GPU has fallen off the bus", _LOST),
    ("requires? reset", "a GPU needs a reset", "reset it (sudo nvidia-smi --gpu-reset -i INDEX) or reboot the machine"),
    ("No devices were found", "the driver could not start any GPU", f"reboot it; {_LOOK}"),
    (
        "Insufficient Permissions|Permission denied",
        "the user may not use the GPUs' device files",
        "add the user to the group of the device files: ls -l /dev/nvidia*",
    ),
    (
        "NVML: Unknown Error",
        "the GPUs were taken away from this container, or the driver has failed",
        f"start the container again, or reboot the machine; {_LOOK}",
    ),
)


@dataclass(frozen=True)
class Fault:
    """partial: the GPUs that nvidia-smi lists can be used, except those with a fault of their own.

    complete: these are all that there are, and nvidia-smi complains of something else.
    """

    what: str
    fix: str
    partial: bool = False
    complete: bool = False
    missing: tuple[str, ...] = ()  # PCI addresses of GPUs that are not listed


def fault(node: NodeFacts) -> Fault | None:
    """None for a machine without a GPU, and for one whose GPUs all work."""
    seen = node.nvidia
    if not (seen.pci or seen.smi or "/dev/nvidia0" in seen.device_files):
        return None
    if not seen.smi:
        return _without_smi(node)
    if seen.smi_exit is None:
        what = "nvidia-smi did not answer within 20 s, so a GPU or its driver is stuck"
        return Fault(what, f"reboot it; {_LOOK}")
    if not node.gpus:
        return _explained(node)
    return _of_some(node)


def broken(gpu: Gpu) -> str:
    """Why this GPU cannot be used, though nvidia-smi lists it; "" if it can."""
    if gpu.compute_mode == "Prohibited":
        return "its compute mode is Prohibited"
    return f'nvidia-smi says "{gpu.fault}"' if gpu.fault else ""


def _without_smi(node: NodeFacts) -> Fault:
    found = node.nvidia.pci
    drivers = {gpu.driver for gpu in found}
    where = _places(found) or "/dev/nvidia0"
    if drivers == {"vfio-pci"}:
        return Fault(f"{where} is kept for virtual machines (driver vfio-pci)", "give it back to the driver nvidia")
    if drivers <= {"nvidia"}:
        what = f"{where} is there, but no nvidia-smi is in the PATH of {node.user or 'the user'}"
        return Fault(what, "install nvidia-smi (nvidia-utils); a container is to be started with --gpus all")
    other = ", ".join(sorted(drivers - {"", "nvidia", "vfio-pci"}))
    what = f"{where} has no NVIDIA driver" + (f", but {other}" if other else "")
    return Fault(what, f"{_INSTALL}; a container is to be started with --gpus all")


def _explained(node: NodeFacts) -> Fault:
    """nvidia-smi lists no GPU."""
    seen = node.nvidia
    said = f'nvidia-smi says "{seen.smi_error}"' if seen.smi_error else "nvidia-smi lists no GPU"
    said += f" (exit code {seen.smi_exit})" if seen.smi_exit else ""
    unknown = ("", "", f"correct what it says: run nvidia-smi there; {_LOOK}")
    known = (row for row in _SAID if re.search(row[0], seen.smi_error, re.IGNORECASE))
    _, meaning, fix = next(known, unknown)
    if meaning.startswith("the driver was") and seen.module:
        meaning += f" ({seen.module})"
    if "module is not loaded" in meaning and (others := {gpu.driver for gpu in seen.pci} - {"", "nvidia"}):
        meaning += f": {_places(seen.pci)} has the driver {', '.join(sorted(others))}"
    if not seen.pci and "/dev/nvidia0" not in seen.device_files:
        fix += ". No NVIDIA GPU is on its PCI bus: without one, uninstall nvidia-smi"
    return Fault(f"{said}: {meaning}" if meaning else said, fix)


def _of_some(node: NodeFacts) -> Fault | None:
    """nvidia-smi lists GPUs; of those that it does not list, a part may belong to other containers or to a VM."""
    seen = node.nvidia
    listed = {gpu.bus for gpu in node.gpus}
    missing = [gpu for gpu in seen.pci if gpu.address not in listed and gpu.driver != "vfio-pci"]
    files = sum(bool(re.fullmatch(r"/dev/nvidia\d+", name)) for name in seen.device_files)
    if "" in listed or files == len(node.gpus):  # no addresses reported; a container with some of the GPUs
        missing = [gpu for gpu in missing if gpu.driver != "nvidia" and "" not in listed]
    found, fixes = [], []
    if missing:
        said = f' ("{seen.smi_error}")' if seen.smi_error else ""
        what = f"nvidia-smi lists {len(node.gpus)} of {len(node.gpus) + len(missing)} GPUs: "
        found.append(f"{what}{_places(missing)} has fallen off the bus or has no driver{said}")
        fixes.append(_LOST)
    elif re.search("Unable to determine the device handle|GPU is lost", seen.smi_error):
        found.append(f'nvidia-smi says "{seen.smi_error}"')
        fixes.append(_LOST)
    for gpu in node.gpus:
        if why := broken(gpu):
            found.append(f"GPU {gpu.index} ({gpu.bus or gpu.uuid}): {why}")
            fixes.append(_fix_of(gpu))
    if not found and seen.smi_exit:  # such as 14: "WARNING: infoROM is corrupted at gpu 0000:07:00.0"
        what = f'nvidia-smi says "{seen.smi_error}" (exit code {seen.smi_exit})'
        return Fault(what, f"inspect it: nvidia-smi -q; {_LOOK}", partial=True, complete=True)
    if not found:
        return None
    every = all(broken(gpu) for gpu in node.gpus)
    places = tuple(gpu.address for gpu in missing)
    return Fault("; ".join(found), "; ".join(dict.fromkeys(fixes)), partial=not every, missing=places)


def _fix_of(gpu: Gpu) -> str:
    if gpu.compute_mode == "Prohibited":
        return f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
    if "lost" in gpu.fault.lower():
        return _LOST
    return (
        f"stop what uses it and reset it (sudo nvidia-smi --gpu-reset -i {gpu.index}), or reboot the machine; {_LOOK}"
    )


def _places(found: tuple[PciGpu, ...] | list[PciGpu]) -> str:
    return (
        " ".join(["the GPU at" if len(found) == 1 else "the GPUs at", ", ".join(g.address for g in found)])
        if found
        else ""
    )
