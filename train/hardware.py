"""Hardware of a process: peak memory, peak FLOP/s of the GPU, and CPU cores close to it."""

from __future__ import annotations

import os
import re
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

# dense TFLOP/s in fp32, TF32 and 16 bits, from the vendor's data sheets; SXM versions unless noted
PEAKS = {
    "T4": (8.1, 8.1, 65.0),
    "V100": (15.7, 15.7, 125.0),
    "A10": (31.2, 62.5, 125.0),
    "A100": (19.5, 156.0, 312.0),
    "L4": (30.3, 60.0, 121.0),
    "L40S": (91.6, 183.0, 362.0),
    "H100 PCIe": (51.0, 378.0, 756.0),
    "H100": (67.0, 494.0, 989.0),
    "H200": (67.0, 494.0, 989.0),
    "B200": (80.0, 1100.0, 2250.0),
    # DGX Spark. NVIDIA gives 1 PFLOP/s in sparse FP4 only: half of it dense, a quarter of that in 16 bits; fp32 from
    # techpowerup.com/gpu-specs/gb10.c4342
    "GB10": (29.7, 62.5, 125.0),
}
TRAINING = 3  # relative to a forward pass: backward computes the gradients of inputs and of weights


def peak_flops(device: str, amp: str, tf32: bool) -> float | None:
    """Return the GPU's peak FLOP/s in the run's precision; None if the GPU is not in the table."""
    for name, (fp32, by_tf32, half) in PEAKS.items():
        if re.search(rf"\b{name}\b", device):
            if amp != "none":
                return half * 1e12
            return (by_tf32 if tf32 else fp32) * 1e12
    return None


def forward_flops(model: nn.Module, side: int) -> float:
    """Return the FLOPs of a forward pass per image (a multiply-add counts as two), computed from shapes only."""
    state = {name: value.to("meta") for name, value in (*model.named_parameters(), *model.named_buffers())}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(model, state, (_two_images(model, side),))
    return float(counter.get_total_flops()) / 2


def training_flops(model: nn.Module, side: int) -> float:
    """Return the FLOPs of forward and backward pass per image; without those of gradients that --freeze saves."""
    if all(parameter.requires_grad for parameter in model.parameters()):
        return TRAINING * forward_flops(model, side)
    state = {
        name: value.detach().to("meta").requires_grad_(value.requires_grad)
        for name, value in (*model.named_parameters(), *model.named_buffers())
    }
    with FlopCounterMode(display=False) as counter:
        functional_call(model, state, (_two_images(model, side),)).sum().backward()
    return float(counter.get_total_flops()) / 2


def _two_images(model: nn.Module, side: int) -> torch.Tensor:
    return torch.empty(2, 3, side, side, device="meta", dtype=next(model.parameters()).dtype)


def ideal_seconds(model: nn.Module, side: int, device: str, amp: str, tf32: bool) -> float | None:
    """Return the minimum training time per image on this GPU; divided by the measured time, it gives the MFU.

    None if the GPU is not in the table, or shapes do not suffice to count the operations of this model. Chowdhery et
    al., arXiv 2204.02311, appendix B.
    """
    peak = peak_flops(device, amp, tf32)
    if peak is None:
        return None
    try:
        operations = training_flops(model, side)
    except Exception:  # noqa: BLE001 - as in `models.check_sides`
        return None
    return operations / peak


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_memory(device: torch.device) -> float:
    """Return the peak memory in MB (1e6 bytes): tensors on a GPU, else the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def near_cores(gpu: int) -> frozenset[int]:
    """Return the cores of the GPU's NUMA node; empty if the kernel does not list them, as in many virtual machines.

    https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-bus-pci
    """
    found = torch.cuda.get_device_properties(gpu)
    if not hasattr(found, "pci_bus_id"):  # torch before 2.6
        return frozenset()
    domain, bus, device = (getattr(found, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    path = Path("/sys/bus/pci/devices") / address / "local_cpulist"
    return cores_of(path.read_text()) if path.exists() else frozenset()


def cores_of(text: str) -> frozenset[int]:
    """Parse a list of cores such as `0-3,8`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))


def bind_to_gpu(near: Sequence[frozenset[int]], local_rank: int) -> int:
    """Bind this process to the cores near its GPU; return the number of local processes that share them.

    `near`: the cores near each local rank's GPU. If unknown, the process is not bound, and all share all cores.
    """
    if sys.platform != "linux":
        return len(near)
    allowed = os.sched_getaffinity(0)
    mine = near[local_rank] & allowed
    if not mine or mine == allowed:
        return len(near)
    os.sched_setaffinity(0, mine)
    return sum(other & allowed == mine for other in near)


def node_name() -> str:
    """Return the node's name in the launcher's job; the host name without the launcher."""
    return os.environ.get("LAUNCHER_NODE") or socket.gethostname()
