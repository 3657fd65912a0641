"""Errors of the NVIDIA Container Toolkit and CDI when a container cannot get GPUs, and fixes. Pure.

tests/unit/test_gpu_containers.py has a recorded message for each row, with its source.
"""

from __future__ import annotations

import re

_CONFIG = "/etc/nvidia-container-runtime/config.toml"
# (pattern in the engine's message, what happened on the node, fix), most specific first
_ERRORS: tuple[tuple[str, str, str], ...] = (
    (
        r"could not select device driver",
        "its engine cannot give GPUs to containers",
        "install the NVIDIA Container Toolkit, then: sudo nvidia-ctk runtime configure --runtime=docker && "
        "sudo systemctl restart docker",
    ),
    (
        r"unsatisfied condition",
        "its NVIDIA driver is too old for the image",
        "update the driver, or choose an older base: launcher image list",
    ),
    (
        r"driver/library version mismatch",
        "its NVIDIA driver was updated, but the old one is still loaded",
        "reboot the node",
    ),
    (
        r"driver not loaded|load library failed: libnvidia-ml|driver rpc error|failed to process request",
        "its NVIDIA driver is not loaded",
        "`nvidia-smi` must work: sudo modprobe nvidia; after a kernel update, reinstall the driver",
    ),
    (
        r"ldcache error",
        "its NVIDIA Container Toolkit cannot run ldconfig",
        f"set `ldconfig` in {_CONFIG}: @/sbin/ldconfig.real on Ubuntu, else @/sbin/ldconfig",
    ),
    (
        r"unknown device",
        "its NVIDIA Container Toolkit does not find the GPU",
        "`nvidia-smi -L` lists its GPUs; launcher doctor checks whether one has fallen off the bus",
    ),
    (
        r"cgroup subsystem devices not found|failed to add device rules|bpf_prog_query",
        "its NVIDIA Container Toolkit cannot open the GPU's device files for the container (cgroup)",
        f"install version 1.18 or newer; for a rootless engine, set no-cgroups = true in {_CONFIG}",
    ),
    (
        r"unresolvable CDI devices runtime\.nvidia\.com",  # since 1.18 it generates these itself at each start
        "its NVIDIA Container Toolkit does not find the GPU or its driver",
        "`nvidia-smi` must list the GPU; sudo nvidia-ctk cdi generate >/dev/null shows missing files",
    ),
    (
        r"unresolvable CDI devices|CDI device injection failed",
        "its CDI specification lacks the GPU",
        "generate it again: sudo nvidia-ctk cdi generate --device-name-strategy=uuid --output=/etc/cdi/nvidia.yaml",
    ),
    (
        r"nvidia-container-cli|nvidia-container-runtime",
        "its NVIDIA Container Toolkit failed",
        "for details: sudo nvidia-container-cli -k -d /dev/tty info",
    ),
)


def gpu_error(message: str) -> tuple[str, str] | None:
    """Return (what, fix) for an engine's error message about GPUs; None for other messages."""
    return next(((what, fix) for pattern, what, fix in _ERRORS if re.search(pattern, message)), None)
