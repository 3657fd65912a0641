"""What the NVIDIA Container Toolkit and CDI say when they cannot give GPUs to a container, and the fix. Pure.

tests/unit/test_gpu_containers.py has a recorded text for each row, with the source.
"""

from __future__ import annotations

import re

_CONFIG = "/etc/nvidia-container-runtime/config.toml"
# (pattern in the engine's message, what happened on the node, the fix), the most specific first
_ERRORS: tuple[tuple[str, str, str], ...] = (
    (
        r"could not select device driver",
        "its engine cannot give GPUs to containers",
        "install the NVIDIA Container Toolkit there, then: sudo nvidia-ctk runtime configure --runtime=docker && "
        "sudo systemctl restart docker",
    ),
    (
        r"unsatisfied condition",
        "its NVIDIA driver is too old for the image",
        "update the driver, or choose an older base: launcher image list",
    ),
    (
        r"driver/library version mismatch",
        "its NVIDIA driver was updated while the old one is still loaded",
        "reboot it",
    ),
    (
        r"driver not loaded|load library failed: libnvidia-ml|driver rpc error|failed to process request",
        "its NVIDIA driver is not loaded",
        "`nvidia-smi` must work there: sudo modprobe nvidia; after an update of the kernel, install the driver again",
    ),
    (
        r"ldcache error",
        "its NVIDIA Container Toolkit cannot run ldconfig",
        f"set `ldconfig` in {_CONFIG} there: @/sbin/ldconfig.real on Ubuntu, else @/sbin/ldconfig",
    ),
    (
        r"unknown device",
        "its NVIDIA Container Toolkit does not find the GPU",
        "`nvidia-smi -L` there lists its GPUs: has one fallen off the bus? launcher doctor checks it",
    ),
    (
        r"cgroup subsystem devices not found|failed to add device rules|bpf_prog_query",
        "its NVIDIA Container Toolkit cannot open the GPU's device files for the container (cgroup)",
        f"install version 1.18 or newer there; for a rootless engine, set no-cgroups = true in {_CONFIG}",
    ),
    (
        r"unresolvable CDI devices runtime\.nvidia\.com",  # its own, which it makes at each start since 1.18
        "its NVIDIA Container Toolkit does not find the GPU or its driver",
        "`nvidia-smi` must list the GPU there; sudo nvidia-ctk cdi generate >/dev/null shows what is missing",
    ),
    (
        r"unresolvable CDI devices|CDI device injection failed",
        "its CDI specification does not have the GPU",
        "write it again there: sudo nvidia-ctk cdi generate --device-name-strategy=uuid --output=/etc/cdi/nvidia.yaml",
    ),
    (
        r"nvidia-container-cli|nvidia-container-runtime",
        "its NVIDIA Container Toolkit failed",
        "`sudo nvidia-container-cli -k -d /dev/tty info` there shows why",
    ),
)


def gpu_error(message: str) -> tuple[str, str] | None:
    """What an engine's message means for the GPUs of a container, and the fix; None for one about something else."""
    return next(((what, fix) for pattern, what, fix in _ERRORS if re.search(pattern, message)), None)
