"""Known causes of failures: patterns in the output of programs, CUDA and NCCL, their meaning and the fix.

docs/gpu.md has the table for GPUs; tests/unit/test_gpu_words.py has a recorded message and its source for each rule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.container_scripts.words import TRACEBACK

_SHM = "shared memory (/dev/shm) is full"
_SHM_FIX = "keep docker.ipc: host and enlarge /dev/shm on the node: mount -o remount,size=16g /dev/shm"
_USERS = "`launcher status --nodes {node}` shows who uses its GPUs"

# (pattern in the output, meaning, fix), the most specific first; {node}: the failing node's name
_GPU: tuple[tuple[str, str, str], ...] = (
    (r"CUDA out of memory|torch\.OutOfMemoryError", "out of GPU memory", "use a smaller batch size, or more nodes"),
    (
        r"CUDA error: out of memory",
        "the GPU was out of memory before the program used it",
        f"{_USERS}; `gpus: N` takes idle ones",
    ),
    (
        r"[Ee]rror \(?802\)?|system not yet initialized",
        "the NVSwitch fabric is not ready (error 802): the fabric manager is not running or its version does not match",
        "on {node}: sudo systemctl enable --now nvidia-fabricmanager; its version must match the driver's",
    ),
    (
        r"CUDA-capable device(\(s\) is/are|s are) busy or unavailable",
        "the GPU is in exclusive compute mode and in use by another process",
        f"{_USERS}; or on {{node}}: sudo nvidia-smi -c DEFAULT",
    ),
    (
        r"Failed to initialize NVML: Unknown Error",
        "the container lost its GPUs because systemd reloaded its units on the node",
        "start again: launcher up --resume; permanent fix: NVIDIA Container Toolkit 1.18 or newer, or CDI on {node}",
    ),
    (
        r"[Dd]river/library version mismatch|unsupported display driver / cuda driver combination",
        "the node's NVIDIA driver was updated, but the old one is still loaded",
        "reboot {node}",
    ),
    (
        r"no CUDA-capable device is detected|No CUDA GPUs are available",
        "the program found no GPU",
        "check {node}: launcher doctor JOB; check whether the program sets CUDA_VISIBLE_DEVICES",
    ),
    (
        r"uncorrectable (NVLink|ECC) error",
        "the GPU's hardware reported an uncorrectable error",
        "on {node}: `nvidia-smi -q -d ECC` shows which GPU; reset it (nvidia-smi --gpu-reset) or reboot; if it happens "
        "again, exclude that GPU with `gpus` and have it replaced",
    ),
    (
        r"fallen off the bus|GPU is lost|NVRM: Xid",
        "a GPU has fallen off the bus",
        "reboot {node}; `dmesg | grep -i xid` there shows which GPU: check its power, cooling and slot",
    ),
    (
        r"illegal memory access|unspecified launch failure",
        "a GPU kernel accessed invalid memory, or the GPU is faulty",
        "find the call with `env: {{CUDA_LAUNCH_BLOCKING: 1}}`; `dmesg | grep -i xid` on {node} shows GPU faults",
    ),
    (
        r"driver version is insufficient|driver on your system is too old|CUDA driver version is too old"
        r"|forward compatibility was attempted|compiled with an unsupported toolchain",
        "the node's NVIDIA driver is too old for this image",
        "update the driver, or choose an older base: launcher image list",
    ),
    (r"Error while creating shared memory segment|failed to extend /dev/shm|posix_fallocate failed", _SHM, _SHM_FIX),
    (
        r"Call to ibv_\w+ failed",
        "NCCL could not use InfiniBand, usually because the memlock limit is too low",
        "on {node}: set LimitMEMLOCK=infinity for docker.service, and check it with `launcher doctor JOB`; or use TCP: "
        "env: {{NCCL_IB_DISABLE: 1}}",
    ),
    (
        r"Mismatched NCCL version",
        "the ranks have different versions of NCCL",
        "use the same image and packages on all nodes; check `code`, `mounts` and LD_LIBRARY_PATH for another torch or "
        "NCCL",
    ),
    (
        r"Duplicate GPU detected",
        "two ranks use the same GPU, which NCCL does not support",
        "set `processes` to the number of GPUs; the program must call torch.cuda.set_device(LOCAL_RANK)",
    ),
    (
        r"socketStartConnect: Connect to|NCCL.*(no socket interface|Bootstrap : no socket)|unable to find address for",
        "the chosen network interface is not usable",
        "set the node's address in the job file: nodes: [{{host: ..., address: ...}}]",
    ),
    (
        r"unhandled system error|ncclSystemError",
        "a system call in NCCL failed",
        "`env: {{NCCL_DEBUG: INFO}}` shows which; `launcher doctor JOB` tests shared memory and the network",
    ),
)
_OTHER: tuple[tuple[str, str, str], ...] = (
    (r"[Bb]us error|unable to open shared memory object|No space left on device.*shm", _SHM, _SHM_FIX),
    (
        r"Address already in use|EADDRINUSE",
        "the rendezvous port is in use on the first node",
        "check for another run: launcher runs; or choose another port: --set port=29501",
    ),
    (
        r"No space left on device",
        "a disk is full",
        "free disk space, or mount a larger disk; `launcher clean` removes old runs",
    ),
    (
        r"[Rr]endezvous.*[Tt]imeout|timed out after \d+ seconds waiting for clients|client socket has timed out",
        "not all nodes met at the rendezvous in time",
        "check that the port is open between the nodes: launcher doctor JOB",
    ),
    (
        r"Timed out waiting \d+ms for (recv|send)|Watchdog caught collective operation timeout",
        "communication with its peers timed out",
        "check the network between the nodes: launcher doctor JOB; if a rank hangs, set hang_timeout",
    ),
    (
        r"ModuleNotFoundError|ImportError",
        "a module could not be imported",
        "add it to image.packages, or check that `code` contains it",
    ),
    (
        r"PermissionError|Permission denied",
        "no permission to read or write a file",
        "check the owner of mounts and data",
    ),
    (r"exec format error", "the image is for another CPU architecture", "build the image for the node's architecture"),
)

_OF_GPUS = re.compile(r"CUDA|NCCL|nccl|NVML|NVRM|CUBLAS|CUDNN")
_PROCESS = re.compile(r"Process (\d+) has ([\d.]+) ([KMG])iB memory in use")
_OWN = re.compile(r"([\d.]+) ([KMG])iB is (?:allocated|reserved) by PyTorch")
_KIB = {"K": 1, "M": 1 << 10, "G": 1 << 20}
_NO_KERNEL = "no kernel image is available for execution on the device"
_COMPILED = re.compile(r"PyTorch install supports CUDA capabilities ((?:(?:sm|compute)_\d+\w*[ ,]*)+)")
_DEVICE = re.compile(r"with CUDA capability sm_(\d+)")
_TOO_OLD_GPU = "no longer supports this GPU because it is too old"


@dataclass(frozen=True)
class Cause:
    what: str
    fix: str


def known_cause(message: str, log: str, node: str) -> Cause | None:
    """Return the cause of the failing rank's message, or None if unknown.

    message: its traceback, or the end of its log. log: more of its log, in which NCCL and CUDA print more details than
    the exception has; searched only if the exception comes from them, or if there is none.
    """
    gpu_lines = "" if TRACEBACK in message and not _OF_GPUS.search(message) else _lines_of_gpus(log)
    if _NO_KERNEL in message or _NO_KERNEL in gpu_lines:
        return _no_kernel(f"{message}\n{log}")
    if "out of memory" in message and (others := _other_processes(message)):
        what = f"out of GPU memory, and other processes use the GPU: {', '.join(others)}"
        return Cause(what, f"{_USERS}; `gpus: N` takes idle ones".format(node=node))
    *specific, system_error = _GPU
    for rules, text in ((specific, message), (specific, gpu_lines), ([system_error], message), (_OTHER, message)):
        for pattern, what, fix in rules:
            if re.search(pattern, text):
                return Cause(what, fix.format(node=node))
    return None


def _lines_of_gpus(log: str) -> str:
    """Return the lines of CUDA and NCCL, except NCCL INFO."""
    return "\n".join(line for line in log.splitlines() if _OF_GPUS.search(line) and "NCCL INFO" not in line)


def _other_processes(message: str) -> list[str]:
    """Return `process 7 has 60.00 GiB` for each other process that torch's message lists.

    In a container, torch does not know its own PID on the host: then its own process is the one with the memory usage
    closest to the size of its allocator.
    """
    last = message[message.rfind("out of memory") :]
    found = [(pid, float(size) * _KIB[unit], f"{size} {unit}iB") for pid, size, unit in _PROCESS.findall(last)]
    if found and "this process has" not in last:
        own = sum(float(size) * _KIB[unit] for size, unit in _OWN.findall(last))
        found.remove(min(found, key=lambda process: abs(process[1] - own)))
    return [f"process {pid} has {size}" for pid, _, size in found]


def _no_kernel(text: str) -> Cause:
    """Return the cause: by torch's earlier warning, the image is too old or too new for the GPU."""
    what = "torch in this image has no kernels for this GPU"
    device, compiled = _DEVICE.search(text), _COMPILED.search(text)
    newer, older = "choose a newer base: launcher image list", "choose an older base: launcher image list"
    if _TOO_OLD_GPU in text:
        return Cause(f"{what}: the image is too new for it", older)
    if device is None or compiled is None:
        return Cause(f"{what}: the image is too old or too new for it", "choose another base: launcher image list")
    known = [int(number) for number in re.findall(r"_(\d+)", compiled[1])]
    what = f"{what}: it is sm_{device[1]}, torch was built for {compiled[1].strip(' ,')}"
    if int(device[1]) > max(known):
        return Cause(f"{what}; the image is too old for it", newer)
    if int(device[1]) < min(known):
        return Cause(f"{what}; the image is too new for it", older)
    return Cause(what, "choose another base: launcher image list")
