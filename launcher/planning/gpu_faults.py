"""Why the GPUs of a machine cannot be used, from the output of nvidia-smi, and the fix. Pure functions.

A machine without a GPU has none on its PCI bus, no /dev/nvidia0 and no nvidia-smi. Every other reason why a GPU cannot
be used is a fault, not "no GPU".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.faults.cause import Cause
from launcher.faults.lookup import cause_of_report
from launcher.faults.table import DMESG, DRIVER_NOT_LOADED, GPU_LOST, NO_DRIVER, OLD_DRIVER_LOADED, RESET, SMI
from launcher.model.facts import Gpu, NodeFacts, PciGpu


@dataclass(frozen=True)
class GpuFault:
    """Why GPUs cannot be used, and the fix.

    partial: the GPUs that nvidia-smi lists can be used, except faulty ones. complete: nvidia-smi lists all GPUs, and
    reports another error.
    """

    what: str
    fix: str
    partial: bool = False
    complete: bool = False
    missing: tuple[str, ...] = ()  # PCI addresses of GPUs that are not listed


def fault(node: NodeFacts) -> GpuFault | None:
    """Return the fault; None for a machine without GPUs, and if all of its GPUs work."""
    seen = node.nvidia
    if not (seen.pci or seen.smi or "/dev/nvidia0" in seen.device_files):
        return None
    if not seen.smi:
        return _without_smi(node)
    if seen.smi_exit is None:
        what = "nvidia-smi did not respond within 20 s: a GPU or its driver hangs"
        return GpuFault(what, f"reboot the node; {DMESG}")
    if not node.gpus:
        return _explained(node)
    return _of_some(node)


def broken(gpu: Gpu) -> str:
    """Return why this GPU cannot be used although nvidia-smi lists it; "" if it can be used."""
    if gpu.compute_mode == "Prohibited":
        return "its compute mode is Prohibited"
    return f'nvidia-smi reports "{gpu.fault}"' if gpu.fault else ""


def _without_smi(node: NodeFacts) -> GpuFault:
    found = node.nvidia.pci
    drivers = {gpu.driver for gpu in found}
    where = _addresses(found) or "/dev/nvidia0"
    if drivers == {"vfio-pci"}:
        what = f"{where} is reserved for virtual machines (driver vfio-pci)"
        return GpuFault(what, "bind it to the driver nvidia")
    if drivers <= {"nvidia"}:
        what = f"{where} exists, but nvidia-smi is not in the PATH of {node.user or 'the user'}"
        return GpuFault(what, "install nvidia-smi (nvidia-utils); start a container with --gpus all")
    other = ", ".join(sorted(drivers - {"", "nvidia", "vfio-pci"}))
    what = f"{where} has no NVIDIA driver" + (f", but {other}" if other else "")
    return GpuFault(what, f"{NO_DRIVER.fix}; start a container with --gpus all")


def _explained(node: NodeFacts) -> GpuFault:
    """Return the fault if nvidia-smi lists no GPU."""
    seen = node.nvidia
    reported = f'nvidia-smi reports "{seen.smi_error}"' if seen.smi_error else "nvidia-smi lists no GPU"
    reported += f" (exit code {seen.smi_exit})" if seen.smi_exit else ""
    unknown = Cause("", f"fix the error that nvidia-smi prints on the node; {DMESG}")
    cause = cause_of_report(SMI, seen.smi_error) or unknown
    meaning, fix = cause.what, cause.fix
    if meaning == OLD_DRIVER_LOADED.what and seen.module:
        meaning += f" ({seen.module})"
    if meaning == DRIVER_NOT_LOADED.what and (others := {gpu.driver for gpu in seen.pci} - {"", "nvidia"}):
        meaning += f": {_addresses(seen.pci)} has the driver {', '.join(sorted(others))}"
    if not seen.pci and "/dev/nvidia0" not in seen.device_files:
        fix += ". No NVIDIA GPU is on the PCI bus: if the machine has none, uninstall nvidia-smi"
    return GpuFault(f"{reported}: {meaning}" if meaning else reported, fix)


def _of_some(node: NodeFacts) -> GpuFault | None:
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
        fixes.append(GPU_LOST.fix)
    elif GPU_LOST.cause(seen.smi_error, "", {}):
        found.append(f'nvidia-smi reports "{seen.smi_error}"')
        fixes.append(GPU_LOST.fix)
    for gpu in node.gpus:
        if why := broken(gpu):
            found.append(f"GPU {gpu.index} ({gpu.bus or gpu.uuid}): {why}")
            fixes.append(_fix_of(gpu))
    if not found and seen.smi_exit:  # such as 14: "WARNING: infoROM is corrupted at gpu 0000:07:00.0"
        what = f'nvidia-smi reports "{seen.smi_error}" (exit code {seen.smi_exit})'
        return GpuFault(what, f"inspect it: nvidia-smi -q; {DMESG}", partial=True, complete=True)
    if not found:
        return None
    every = all(broken(gpu) for gpu in node.gpus)
    addresses = tuple(gpu.address for gpu in missing)
    return GpuFault("; ".join(found), "; ".join(dict.fromkeys(fixes)), partial=not every, missing=addresses)


def _fix_of(gpu: Gpu) -> str:
    if gpu.compute_mode == "Prohibited":
        return f"sudo nvidia-smi -i {gpu.index} -c DEFAULT"
    if "lost" in gpu.fault.lower():
        return GPU_LOST.fix
    return f"{RESET.format(index=gpu.index)}; {DMESG}"


def _addresses(found: tuple[PciGpu, ...] | list[PciGpu]) -> str:
    return (
        " ".join(["the GPU at" if len(found) == 1 else "the GPUs at", ", ".join(g.address for g in found)])
        if found
        else ""
    )
