"""Faults of machines with GPUs, one per row: a recorded text with its source, and the expected message.

The unit tests of parsers and rules (tests/unit) and the tests of the CLI on the bed (tests/e2e/test_gpus.py,
test_gpu_engine.py) use the same rows. No fault was reproduced on real hardware.
"""

from __future__ import annotations

import re

from tests import nvidia
from tests.nvidia import Card, Machine, cards

MIG = [Card(f"0{7 + index}:00.0", uuid, mig="Enabled") for index, uuid in enumerate(nvidia.MIG_UUIDS)]

# A machine with unusable GPUs, part of the error message, part of the fix
FAULTS = {
    "mismatch": (Machine(cards(2), nvidia.MISMATCH), "Driver/library version mismatch", "reload the modules"),
    "module not loaded": (Machine(cards(2, kernel=""), nvidia.NO_DRIVER), "couldn't communicate", "modprobe nvidia"),
    "nouveau": (
        Machine(cards(1, kernel="nouveau"), nvidia.NO_DRIVER),
        "0000:07:00.0 has the driver nouveau",
        "modprobe",
    ),
    "library": (Machine(cards(1), nvidia.NO_LIBRARY), "libnvidia-ml.so", "install NVIDIA's driver"),
    "lost": (Machine(cards(2), nvidia.LOST), "GPU is lost", "dmesg"),
    "handle": (Machine(cards(2), nvidia.HANDLE), "GPU 0000:0B:00.0: Unknown Error", "reboot the node"),
    "one of eight": (
        Machine([*cards(7), Card("3f:00.0", listed=False)]),
        "lists 7 of 8 GPUs: the GPU at 0000:3f",
        "dmesg",
    ),
    "one handle": (
        Machine([*cards(3), Card("34:00.0", listed=False)], complaint=nvidia.HANDLE_OF_ONE),
        '0000:34:00.0 has fallen off the bus or has no driver ("Unable to determine the device handle for GPU1',
        "reboot the node",
    ),
    "no devices": (Machine(cards(1), nvidia.NO_DEVICES), "No devices were found", "dmesg"),
    "unknown error": (Machine(cards(1), nvidia.UNKNOWN), "NVML: Unknown Error", "start the container again"),
    "unknown error text": (Machine(cards(1), ("segmentation fault\n", 139)), "segmentation fault", "nvidia-smi prints"),
    "no error text": (Machine(cards(1), ("", 1)), "lists no GPU (exit code 1)", "nvidia-smi prints"),
    "hangs": (Machine(cards(2), hangs=True), "did not respond within 20 s", "reboot the node"),
    "needs a reset": (
        Machine([*cards(1), Card("0f:00.0", temperature=nvidia.RESET)]),
        'not all of its GPUs can be used: GPU 1 (0000:0f:00.0): nvidia-smi reports "GPU requires reset"',
        "--gpu-reset -i 1",
    ),
    "prohibited": (Machine(cards(1, mode="Prohibited")), "compute mode is Prohibited", "-c DEFAULT"),
    "no driver": (Machine(cards(2, kernel=""), smi=False, files=()), "0000:0f:00.0 has no NVIDIA driver", "install"),
    "nouveau alone": (Machine(cards(1, kernel="nouveau"), smi=False, files=()), "but nouveau", "install"),
    "no nvidia-smi": (Machine(cards(1), smi=False), "nvidia-smi is not in the PATH", "nvidia-utils"),
    "device file alone": (Machine(smi=False), "/dev/nvidia0 exists", "--gpus all"),
    "virtual machines": (Machine(cards(1, kernel="vfio-pci"), smi=False, files=()), "vfio-pci", "bind it to"),
    "nvidia-smi alone": (Machine(failure=nvidia.NO_DRIVER, files=()), "couldn't communicate", "uninstall nvidia-smi"),
    "empty MIG": (
        Machine(MIG[:1], mig_list=nvidia.MIG_LIST.splitlines(keepends=True)[0]),
        "have no instances",
        "mig -cgi",
    ),
}

# https://github.com/MauriceNino/dashdot/issues/1226
UNSATISFIED = (
    "failed to create task for container: failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: error during container init: error running prestart hook #0: exit status 1, "
    "stdout: , stderr: Auto-detected mode as 'legacy'\nnvidia-container-cli: requirement error: unsatisfied condition: "
    "cuda>=12.8, please update your driver to a newer version, or use an earlier cuda container: unknown"
)

HOOK = "OCI runtime create failed: ... error running hook: exit status 1, stdout: , stderr: "
# (source, message of the engine, its meaning, the fix)
TOOLKIT = [
    (
        "docker run --gpus all without the toolkit, everywhere",
        'could not select device driver "nvidia" with capabilities: [[gpu]]',
        "cannot give GPUs",
        "install the NVIDIA Container Toolkit",
    ),
    ("https://github.com/MauriceNino/dashdot/issues/1226", UNSATISFIED, "too old for the image", "update the driver"),
    (
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/260",
        f"{HOOK}nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown.",
        "driver is not loaded",
        "sudo modprobe nvidia",
    ),
    (
        "https://github.com/docker/for-win/issues/13835",
        f"{HOOK}nvidia-container-cli: initialization error: load library failed: libnvidia-ml.so.1: cannot open shared "
        "object file: no such file or directory: unknown.",
        "finds no NVIDIA driver",
        "Docker Engine",
    ),
    (
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/394",
        f"{HOOK}nvidia-container-cli: initialization error: nvml error: driver/library version mismatch: unknown.",
        "was updated",
        "reboot",
    ),
    (
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/183",
        f"{HOOK}nvidia-container-cli: initialization error: driver error: failed to process request: unknown.",
        "driver is not loaded",
        "nvidia-smi",
    ),
    (
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/147",
        f"{HOOK}nvidia-container-cli: ldcache error: process /sbin/ldconfig.real failed with error code: 1: unknown.",
        "cannot run ldconfig",
        "config.toml",
    ),
    (
        "https://github.com/xerrors/Yuxi/issues/211",
        f"{HOOK}nvidia-container-cli: device error: 1: unknown device: unknown",
        "does not find the GPU",
        "nvidia-smi -L",
    ),
    (
        "https://github.com/NVIDIA/k8s-device-plugin/issues/98",
        f"{HOOK}nvidia-container-cli: device error: unknown device id: GPU-1",
        "does not find the GPU",
        "launcher doctor",
    ),
    (
        "https://github.com/NVIDIA/nvidia-docker/issues/1447",
        f"{HOOK}nvidia-container-cli: container error: cgroup subsystem devices not found: unknown.",
        "(cgroup)",
        "1.18",
    ),
    (
        "https://github.com/NVIDIA/libnvidia-container/issues/154",
        f"{HOOK}nvidia-container-cli: mount error: failed to add device rules: unable to find any existing device "
        "filters attached to the cgroup: bpf_prog_query(BPF_CGROUP_DEVICE) failed: operation not permitted: unknown.",
        "(cgroup)",
        "no-cgroups = true",
    ),
    (
        "https://github.com/devnen/Chatterbox-TTS-Server/issues/5",
        "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all",
        "CDI specification",
        "nvidia-ctk cdi generate",
    ),
    (
        "https://github.com/VERT-sh/vertd/issues/39; NVIDIA/nvidia-container-toolkit issue 1537 has the cause",
        "OCI runtime create failed: could not apply required modification to OCI specification: error modifying OCI "
        "spec: failed to inject CDI devices: unresolvable CDI devices runtime.nvidia.com/gpu=all",
        "does not find the GPU or its driver",
        "nvidia-ctk cdi generate >/dev/null shows",
    ),
    (
        "https://github.com/NVIDIA/nvidia-docker/issues/1348",
        f"{HOOK}nvidia-container-cli: detection error: nvml error: unknown error: unknown.",
        "Container Toolkit failed",
        "nvidia-container-cli -k -d /dev/tty info",
    ),
]

HEAD = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n'
# (source, error of the failing rank, the rest of its log, the cause, the fix)
RECORDED = [
    (
        "https://github.com/haotian-liu/LLaVA/issues/683",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
        "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
        "",
        "fabric",
        "on the node: sudo systemctl enable --now nvidia-fabricmanager",
    ),
    (
        "https://github.com/pytorch/pytorch/issues/35710",
        "RuntimeError: cuda runtime error (802) : system not yet initialized at .../THC/THCGeneral.cpp:50",
        "",
        "fabric",
        "nvidia-fabricmanager",
    ),
    (
        "https://github.com/facebookresearch/detectron2/issues/2580",
        "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
        "",
        "exclusive compute mode",
        "nvidia-smi -c DEFAULT",
    ),
    (
        "https://github.com/ultralytics/ultralytics/issues/19744",
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "",
        "exclusive compute mode",
        "launcher status --nodes n0",
    ),
    (
        "https://github.com/triton-inference-server/tensorrtllm_backend/issues/336",
        "RuntimeError: CUDA error: no CUDA-capable device is detected",
        "",
        "found no GPU",
        "launcher doctor JOB",
    ),
    (
        "https://github.com/Grace9994/CoMoSVC/issues/6",
        "RuntimeError: No CUDA GPUs are available",
        "",
        "found no GPU",
        "CUDA_VISIBLE_DEVICES",
    ),
    (
        "https://github.com/jade-hpc-gpu/jade-hpc-gpu.github.io/issues/194",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously "
        "reported at some other API call, so the stacktrace below might be incorrect.",
        "",
        "uncorrectable error",
        "nvidia-smi -q -d ECC",
    ),
    (
        "https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1151",
        "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.",
        "",
        "fallen off the bus",
        "reboot the node",
    ),
    (
        "https://github.com/JosephKJ/OWOD/issues/81",
        "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost. Reboot the system to recover this "
        "GPU",
        "",
        "fallen off the bus",
        "sudo dmesg",
    ),
    (
        "https://github.com/pytorch/pytorch/issues/152780",
        "terminate called after throwing an instance of 'c10::Error'",
        "[rank0]:[E504 22:44:08.389636235 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process "
        "group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n",
        "accessed invalid memory",
        "CUDA_LAUNCH_BLOCKING",
    ),
    (
        "https://github.com/meta-llama/llama-cookbook/issues/290",
        "what():  [Rank 0] NCCL watchdog thread terminated with exception: CUDA error: unspecified launch failure",
        "",
        "accessed invalid memory, or the GPU is faulty",
        "dmesg | grep -i xid",
    ),
    (
        "https://github.com/lianqi1008/Control-GIC/issues/6",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.89 GiB. GPU 0 has a total capacity of 79.14 "
        "GiB of which 58.59 GiB is free. Process 4078482 has 11.29 GiB memory in use. Including non-PyTorch memory, "
        "this process has 9.25 GiB memory in use. Of the allocated memory 8.27 GiB is allocated by PyTorch, and 500.38 "
        "MiB is reserved by PyTorch but unallocated.",
        "",
        "other processes use the GPU: process 4078482 has 11.29 GiB",
        "launcher status --nodes n0",
    ),
    (
        "https://github.com/FoundationVision/GenerateU/issues/10 (in a container: the process is the program itself)",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacty of "
        "14.75 GiB of which 235.06 MiB is free. Process 20398 has 14.52 GiB memory in use. Of the allocated memory "
        "14.06 GiB is allocated by PyTorch, and 330.42 MiB is reserved by PyTorch but unallocated.",
        "",
        "out of GPU memory",
        "batch size",
    ),
    (
        "https://github.com/pytorch/pytorch/issues/81883 and, of the warning, "
        "https://github.com/Turoad/CLRNet/issues/83",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "NVIDIA GeForce RTX 3090 with CUDA capability sm_86 is not compatible with the current PyTorch installation.\n"
        "The current PyTorch install supports CUDA capabilities sm_37 sm_50 sm_60 sm_70.\n",
        "it is sm_86, torch was built for sm_37 sm_50 sm_60 sm_70; the image is too old",
        "newer base",
    ),
    (
        "https://github.com/pytorch/pytorch/issues/6515",
        "RuntimeError: cuda runtime error (48): no kernel image is available for execution on the device",
        "Found GPU0 GeForce 820M which is of cuda capability 2.1.\n"
        "PyTorch no longer supports this GPU because it is too old.\n",
        "the image is too new",
        "older base",
    ),
    (
        "https://github.com/NVIDIA/nccl-tests/issues/166 and pytorch's message",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled system error (run "
        "with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.18.1",
        "ubuntu:9621:9688 [3] misc/shmutils.cc:112 NCCL WARN Error while creating shared memory segment "
        "/dev/shm/nccl-KWfVyt (size 5967872)\n",
        "shared memory (/dev/shm) is full",
        "remount,size=16g",
    ),
    (
        "https://github.com/NVIDIA/nccl/issues/342",
        "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:784, unhandled system error, NCCL version 2.7.8",
        "x:1:2 [0] include/shm.h:28 NCCL WARN Call to posix_fallocate failed: No space left on device\n",
        "shared memory (/dev/shm) is full",
        "docker.ipc: host",
    ),
    (
        "https://github.com/vllm-project/vllm/issues/6574",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, "
        "unhandled "
        "system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclSystemError: System call (e.g. "
        "socket, malloc) or external library call failed or device error. \nLast error:\n",
        "",
        "a system call in NCCL failed",
        "NCCL_DEBUG: INFO",
    ),
    (
        "https://github.com/awslabs/awsome-distributed-ai/issues/192",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1331, unhandled system error (run "
        "with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.18.5 ncclSystemError: System call (e.g. socket, malloc) or "
        "external library call failed or device error. Last error: socketStartConnect: Connect to 127.0.0.1<45069> "
        "failed : Software caused connection abort",
        "",
        "network interface",
        "nodes: [{host: ..., address: ...}]",
    ),
    (
        "https://github.com/NVIDIA/nccl-tests/issues/206",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:219, unhandled system error",
        "n:1:2 [0] misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory\n",
        "memlock limit is too low",
        "LimitMEMLOCK=infinity",
    ),
    (
        "https://github.com/NVIDIA/nccl/issues/380",
        "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:514, unhandled system error, NCCL version 2.7.8",
        "spark01:2683:2826 [0] misc/ibvwrap.cc:268 NCCL WARN Call to ibv_create_cq failed\n",
        "could not use InfiniBand",
        "NCCL_IB_DISABLE: 1",
    ),
    (
        "init.cc of https://github.com/NVIDIA/nccl",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, invalid usage",
        "n:1:2 [0] init.cc:720 NCCL WARN Mismatched NCCL version detected : rank 1 version 22705 rank 0 version "
        "22703\n",
        "different versions of NCCL",
        "LD_LIBRARY_PATH",
    ),
    (
        "https://github.com/verl-project/verl/issues/161",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, invalid "
        "usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.20.5\nncclInvalidUsage: This usually reflects "
        "invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA "
        "device 10",
        "",
        "two ranks use the same GPU",
        "set_device",
    ),
    (
        "NCCLBootstrap.cpp of nccl2 in pytorch 2.15, and init.cc of https://github.com/NVIDIA/nccl",
        "RuntimeError: Failed to initialize NCCL communicator: invalid usage (run with NCCL_DEBUG=WARN for details) \n"
        "NCCL Last Error: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10",
        "",
        "two ranks use the same GPU",
        "set_device",
    ),
    (
        "ProcessGroupNCCL.cpp of nccl2 in pytorch 2.15, and the log of https://github.com/NVIDIA/nccl/issues/380",
        "RuntimeError: NCCL AllReduce failed: unhandled system error (run with NCCL_DEBUG=INFO for details) \n"
        "NCCL Last Error: ",
        "spark01:2683:2826 [0] misc/ibvwrap.cc:268 NCCL WARN Call to ibv_create_cq failed\n",
        "could not use InfiniBand",
        "NCCL_IB_DISABLE: 1",
    ),
    (
        "WorkNCCL of nccl2 in pytorch 2.15: the text of pytorch's pull request 192281",
        "RuntimeError: Watchdog caught collective operation timeout: NCCL operation timed out",
        "",
        "communication with its peers timed out",
        "hang_timeout",
    ),
    (
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/48",
        "pynvml.NVMLError_Unknown: Failed to initialize NVML: Unknown Error",
        "",
        "a container has lost its GPUs",
        "CDI",
    ),
    (
        "https://github.com/llm-d/llm-d/issues/706",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
        "NumCudaDevices() that might have already set an error? Error 803: system has unsupported display driver / "
        "cuda "
        "driver combination",
        "",
        "libcuda",
        "cuda/compat",
    ),
    (
        "https://github.com/NVIDIA/nvbandwidth/issues/61",
        "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        "",
        "driver is too old",
        "update the driver",
    ),
]


def output(error: str, log: str) -> str:
    """Return the output of the failing rank, for a row of RECORDED."""
    exception = re.match(r"[\w.]+(Error|Error_\w+): ", error)  # others: a thread of C++ ended it, a tool said it
    return f"step 3\n{log}{HEAD if exception else ''}{error}\n"
