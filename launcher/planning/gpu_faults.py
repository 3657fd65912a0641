"""Why the GPUs of a machine cannot be used, from the output of nvidia-smi, and the fix. Pure functions.

A machine without a GPU has none on its PCI bus, no /dev/nvidia0 and no nvidia-smi. Every other reason why a GPU cannot
be used is a fault, not "no GPU".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.model.facts import Gpu, NodeFacts, PciGpu

_DMESG = "for the cause, run on the node: sudo dmesg | grep -iE 'nvrm|xid'"
_INSTALL = "install NVIDIA's driver on the node (on Ubuntu: sudo ubuntu-drivers install --gpgpu) and reboot it"
_LOST = f"reboot the node; {_DMESG}. If the error recurs, check the GPU's power, cooling and seating"
# Output of nvidia-smi (regular expression), its meaning, the fix
_KNOWN_ERRORS = (
    (
        "Driver/library version mismatch",
        "the driver was upgraded and its old kernel module is still loaded",
        "reboot the node, or stop all programs that use the GPUs and reload the modules: sudo rmmod nvidia_drm "
        "nvidia_modeset nvidia_uvm nvidia && sudo modprobe nvidia",
    ),
    (
        "couldn't communicate with the NVIDIA driver",
        "the driver's kernel module is not loaded",
        f"sudo modprobe nvidia; after a kernel upgrade, reinstall the driver and reboot; {_DMESG}",
    ),
    (
        "couldn't find libnvidia-ml|NVML: (Shared )?Library Not Found|NVML Shared Library",
        "the driver's libraries are not installed",
        _INSTALL,
    ),
    ("GPU is lost|fallen off the bus|Unable to determine the device handle", "a GPU has fallen off the bus", _LOST),
    ("requires? reset", "a GPU needs a reset", "reset it (sudo nvidia-smi --gpu-reset -i INDEX) or reboot the machine"),
    ("No devices were found", "the driver could not initialize any GPU", f"reboot the node; {_DMESG}"),
    (
        "Insufficient Permissions|Permission denied",
        "the user has no permission for the GPUs' device files",
        "add the user to the group of the device files: ls -l /dev/nvidia*",
    ),
    (
        "NVML: Unknown Error",
        "this container has lost access to the GPUs, or the driver has failed",
        f"restart the container, or reboot the machine; {_DMESG}",
    ),
)


@dataclass(frozen=True)
class Fault:
    """Why GPUs cannot be used, and the fix.

    partial: the GPUs that nvidia-smi lists can be used, except faulty ones. complete: nvidia-smi lists all GPUs, and
    reports another error.
    """

    what: str
    fix: str
    partial: bool = False
    complete: bool = False
    missing: tuple[str, ...] = ()  # PCI addresses of GPUs that are not listed


def fault(node: NodeFacts) -> Fault | None:
    """Return the fault; None for a machine without GPUs, and if all of its GPUs work."""
    seen = node.nvidia
    if not (seen.pci or seen.smi or "/dev/nvidia0" in seen.device_files):
        return None
    if not seen.smi:
        return _without_smi(node)
    if seen.smi_exit is None:
        what = "nvidia-smi did not respond within 20 s: a GPU or its driver hangs"
        return Fault(what, f"reboot the node; {_DMESG}")
    if not node.gpus:
        return _explained(node)
    return _of_some(node)


def broken(gpu: Gpu) -> str:
    """Return why this GPU cannot be used although nvidia-smi lists it; "" if it can be used."""
    if gpu.compute_mode == "Prohibited":
        return "its compute mode is Prohibited"
    return f'nvidia-smi reports "{gpu.fault}"' if gpu.fault else ""


def _without_smi(node: NodeFacts) -> Fault:
    found = node.nvidia.pci
    drivers = {gpu.driver for gpu in found}
    where = _addresses(found) or "/dev/nvidia0"
    if drivers == {"vfio-pci"}:
        what = f"{where} is reserved for virtual machines (driver vfio-pci)"
        return Fault(what, "bind it to the driver nvidia")
    if drivers <= {"nvidia"}:
        what = f"{where} exists, but nvidia-smi is not in the PATH of {node.user or 'the user'}"
        return Fault(what, "install nvidia-smi (nvidia-utils); start a container with --gpus all")
    other = ", ".join(sorted(drivers - {"", "nvidia", "vfio-pci"}))
    what = f"{where} has no NVIDIA driver" + (f", but {other}" if other else "")
    return Fault(what, f"{_INSTALL}; start a container with --gpus all")


def _explained(node: NodeFacts) -> Fault:
    """Return the fault if nvidia-smi lists no GPU."""
    seen = node.nvidia
    reported = f'nvidia-smi reports "{seen.smi_error}"' if seen.smi_error else "nvidia-smi lists no GPU"
    reported += f" (exit code {seen.smi_exit})" if seen.smi_exit else ""
    unknown = ("", "", f"fix the error that nvidia-smi prints on the node; {_DMESG}")
    known = (row for row in _KNOWN_ERRORS if re.search(row[0], seen.smi_error, re.IGNORECASE))
    _, meaning, fix = next(known, unknown)
    if meaning.startswith("the driver was") and seen.module:
        meaning += f" ({seen.module})"
    if "module is not loaded" in meaning and (others := {gpu.driver for gpu in seen.pci} - {"", "nvidia"}):
        meaning += f": {_addresses(seen.pci)} has the driver {', '.join(sorted(others))}"
    if not seen.pci and "/dev/nvidia0" not in seen.device_files:
        fix += ". No NVIDIA GPU is on the PCI bus: if the machine has none, uninstall nvidia-smi"
    return Fault(f"{reported}: {meaning}" if meaning else reported, fix)


def _of_some(node: NodeFacts) -> Fault | None:
    """Return the fault if nvidia-smi lists GPUs. Others may belong to other containers or to a virtual machine."""
    seen = node.nvidia
    listed = {gpu.bus for gpu in node.gpus}
    missing = [gpu for gpu in seen.pci if gpu.address not in listed and gpu.driver != "vfio-pci"]
    files = sum(bool(re.fullmatch(r"/dev/nvidia\d+", name)) for name in seen.device_files)
    if "" in listed or files == len(node.gpus):  # no addresses reported; a container with some of the GPUs
        missing = [gpu for gpu in missing if gpu.driver != "nvidia" and "" not in listed]
    found, fixes = [], []
    if missing:
        reported = f' ("{seen.smi_error}")' if seen.smi_error else ""
        what = f"nvidia-smi lists {len(node.gpus)} of {len(node.gpus) + len(missing)} GPUs: "
        found.append(f"{what}{_addresses(missing)} has fallen off the bus or has no driver{reported}")
        fixes.append(_LOST)
    elif re.search("Unable to determine the device handle|GPU is lost", seen.smi_error):
        found.append(f'nvidia-smi reports "{seen.smi_error}"')
        fixes.append(_LOST)
    for gpu in node.gpus:
        if why := broken(gpu):
            found.append(f"GPU {gpu.index} ({gpu.bus or gpu.uuid}): {why}")
            fixes.append(_fix_of(gpu))
    if not found and seen.smi_exit:  # such as 14: "WARNING: infoROM is corrupted at gpu 0000:07:00.0"
        what = f'nvidia-smi reports "{seen.smi_error}" (exit code {seen.smi_exit})'
        return Fault(what, f"inspect it: nvidia-smi -q; {_DMESG}", partial=True, complete=True)
    if not found:
        return None
    every = all(broken(gpu) for gpu in node.gpus)
    addresses = tuple(gpu.address for gpu in missing)
    return Fault("; ".join(found), "; ".join(dict.fromkeys(fixes)), partial=not every, missing=addresses)


def _fix_of(gpu: Gpu) -> str:
    if gpu.compute_mode == "Prohibited":
        return f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
    if "lost" in gpu.fault.lower():
        return _LOST
    return (
        f"stop all programs that use it and reset it (sudo nvidia-smi --gpu-reset -i {gpu.index}), or reboot the "
        f"machine; {_DMESG}"
    )


def _addresses(found: tuple[PciGpu, ...] | list[PciGpu]) -> str:
    return (
        " ".join(["the GPU at" if len(found) == 1 else "the GPUs at", ", ".join(g.address for g in found)])
        if found
        else ""
    )
