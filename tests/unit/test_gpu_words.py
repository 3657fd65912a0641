"""What CUDA and NCCL say when they fail, each text recorded by someone (the source beside it): its cause and its fix.

None was seen on hardware of ours.
"""

from __future__ import annotations

import pytest

from launcher.run.diagnose import first_failure
from launcher.run.known_causes import known_cause
from tests.unit.test_diagnose import evidence

HEAD = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n'
# (source, words of the failing rank, the rest of its log, the cause, the fix)
RECORDED = [
    (
        "https://github.com/haotian-liu/LLaVA/issues/683",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
        "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
        "",
        "fabric",
        "on n0: sudo systemctl enable --now nvidia-fabricmanager",
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
        "exclusive mode",
        "nvidia-smi -c DEFAULT",
    ),
    (
        "https://github.com/ultralytics/ultralytics/issues/19744",
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "",
        "exclusive mode",
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
        "reboot n0",
    ),
    (
        "https://github.com/JosephKJ/OWOD/issues/81",
        "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost. Reboot the system to recover this "
        "GPU",
        "",
        "fallen off the bus",
        "dmesg | grep -i xid",
    ),
    (
        "https://github.com/pytorch/pytorch/issues/152780",
        "terminate called after throwing an instance of 'c10::Error'",
        "[rank0]:[E504 22:44:08.389636235 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process "
        "group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered\n",
        "memory that is not its own",
        "CUDA_LAUNCH_BLOCKING",
    ),
    (
        "https://github.com/meta-llama/llama-cookbook/issues/290",
        "what():  [Rank 0] NCCL watchdog thread terminated with exception: CUDA error: unspecified launch failure",
        "",
        "memory that is not its own, or the GPU is faulty",
        "dmesg | grep -i xid",
    ),
    (
        "https://github.com/lianqi1008/Control-GIC/issues/6",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.89 GiB. GPU 0 has a total capacity of 79.14 "
        "GiB of which 58.59 GiB is free. Process 4078482 has 11.29 GiB memory in use. Including non-PyTorch memory, "
        "this process has 9.25 GiB memory in use. Of the allocated memory 8.27 GiB is allocated by PyTorch, and 500.38 "
        "MiB is reserved by PyTorch but unallocated.",
        "",
        "other processes use it: process 4078482 has 11.29 GiB",
        "launcher status --nodes n0",
    ),
    (
        "https://github.com/FoundationVision/GenerateU/issues/10 (in a container: the process is the program itself)",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 496.00 MiB. GPU 0 has a total capacty of "
        "14.75 GiB of which 235.06 MiB is free. Process 20398 has 14.52 GiB memory in use. Of the allocated memory "
        "14.06 GiB is allocated by PyTorch, and 330.42 MiB is reserved by PyTorch but unallocated.",
        "",
        "the GPU's memory is full",
        "batch size",
    ),
    (
        "https://github.com/pytorch/pytorch/issues/81883 and, of the warning, "
        "https://github.com/Turoad/CLRNet/issues/83",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "NVIDIA GeForce RTX 3090 with CUDA capability sm_86 is not compatible with the current PyTorch installation.\n"
        "The current PyTorch install supports CUDA capabilities sm_37 sm_50 sm_60 sm_70.\n",
        "it is sm_86, they are for sm_37 sm_50 sm_60 sm_70; the image is too old",
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
        "a system call of NCCL failed",
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
        "lock enough memory (memlock)",
        "LimitMEMLOCK=infinity",
    ),
    (
        "https://github.com/NVIDIA/nccl/issues/380",
        "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:514, unhandled system error, NCCL version 2.7.8",
        "spark01:2683:2826 [0] misc/ibvwrap.cc:268 NCCL WARN Call to ibv_create_cq failed\n",
        "memlock",
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
        "two ranks use one GPU",
        "set_device",
    ),
    (
        "https://github.com/NVIDIA/nvidia-container-toolkit/issues/48",
        "pynvml.NVMLError_Unknown: Failed to initialize NVML: Unknown Error",
        "",
        "lost its GPUs: systemd reloaded",
        "CDI",
    ),
    (
        "https://github.com/llm-d/llm-d/issues/706",
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
        "NumCudaDevices() that might have already set an error? Error 803: system has unsupported display driver / "
        "cuda "
        "driver combination",
        "",
        "driver was updated",
        "reboot n0",
    ),
    (
        "https://github.com/NVIDIA/nvbandwidth/issues/61",
        "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        "",
        "driver is too old",
        "update the driver",
    ),
]


@pytest.mark.parametrize(("source", "words", "log", "cause", "fix"), RECORDED, ids=[row[0] for row in RECORDED])
def test_what_was_recorded_is_told_with_its_cause_and_fix(
    source: str, words: str, log: str, cause: str, fix: str
) -> None:
    head = "" if words.startswith("terminate") else HEAD  # a thread of C++ ended the program
    own = f"step 3\n{log}{head}{words}\n"
    found = first_failure([evidence(0, own)])
    assert found is not None, source
    assert cause in found.what
    assert fix in found.cure


def test_the_process_that_is_torch_itself_is_not_called_another_one() -> None:
    """In a container torch does not know its own process id among those of the node."""
    words = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of "
        "79.15 GiB "
        "of which 0.5 GiB is free. Process 11 has 60.00 GiB memory in use. Process 12 has 18.50 GiB memory in use. Of "
        "the allocated memory 17.50 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
    )
    found = known_cause(words, "", "gpu-a")
    assert found is not None
    assert found.what.endswith("process 11 has 60.00 GiB")


def test_a_warning_of_nccl_is_not_blamed_for_an_error_of_the_program() -> None:
    log = "n:1:2 [0] misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr failed\n"
    assert known_cause(f"{HEAD}KeyError: 'dog'", log, "n0") is None
