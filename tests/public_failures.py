"""Failures drawn from public threads, to test that the launcher names the right cause or none.

FIRST was drawn before the table of faults was read, LATER after it, by plain questions (`docker run --gpus all error
response from daemon could not start`) and as their first answers came. JUDGED was drawn by someone else, who knew no
rule, and wrote down what would be right and wrong to say; MISLED are those to which something wrong was said after it.
"""

from __future__ import annotations

from dataclasses import dataclass

PROGRAM, ENGINE = "program", "engine"


@dataclass(frozen=True)
class Row:
    """right: what a right cause or its fix says, a pattern; None: the text alone does not tell the cause."""

    source: str  # of GitHub
    who: str
    text: str
    right: str | None
    limited: bool = True  # of the memlock limit of its containers
    code: int = 1  # with which the program ended


FIRST = [
    Row(
        "haotian-liu/LLaVA#1466",
        PROGRAM,
        "Unable to determine the device handle for GPU0000:4F:00.0: Unknown Error",
        "GPU.*(lost|bus|fell|reset|reboot)|reboot",
    ),
    Row(
        "rusty1s/himp-gnn#7",
        PROGRAM,
        (
            "    fd = df.detach()\n"
            '  File "/usr/lib/python3.6/multiprocessing/reduction.py", line 161, in recvfds\n'
            "    len(ancdata))\n"
            "RuntimeError: received 0 items of ancdata"
        ),
        "open files|sharing_strategy",
    ),
    Row(
        "rusty1s/himp-gnn#7",
        PROGRAM,
        ("RuntimeError: unable to open shared memory object </torch_5535_1638182315> in read-write mode"),
        "open files|shm|shared memory|sharing_strategy",
    ),
    Row(
        "open-mmlab/mmdetection#4835",
        PROGRAM,
        (
            "RuntimeError: [enforce fail at inline_container.cc:144] . PytorchStreamReader "
            "failed reading zip archive: failed finding central directory"
        ),
        "checkpoint|file is (cut|not whole|damaged|truncated)|incomplete|whole",
    ),
    Row(
        "lanl/PyBNF#118",
        PROGRAM,
        "slurmstepd: error: Detected 2 oom-kill event(s) in step 3756240.batch cgroup.",
        "memory",
    ),
    Row(
        "ai4d-iasc/trixie#58",
        PROGRAM,
        "srun: error: Task launch for 36.0 failed on node cn131: Job credential expired",
        "clock|time",
    ),
    Row(
        "NOAA-EPIC/EAGLE#121",
        PROGRAM,
        (
            '  File "/scratch5/x/EAGLE/src/conda/envs/training/lib/python3.12/site-packages/trito'
            'n/runtime/cache.py", line 116, in put\n'
            "    with open(temp_path, mode) as f:\n"
            "         ^^^^^^^^^^^^^^^^^^^^^\n"
            "OSError: [Errno 122] Disk quota exceeded"
        ),
        "quota",
    ),
    Row(
        "open-mmlab/mmdetection#12069",
        PROGRAM,
        "OSError: [Errno 122] Disk quota exceeded",
        "quota",
    ),
    Row(
        "NVIDIA/nccl#1029",
        PROGRAM,
        (
            "rdma-test-gpu-worker-1:2918:4483 [4] transport/nvls.cc:245 NCCL WARN Cuda failure "
            "'initialization error'\n"
            "rdma-test-gpu-worker-1:2918:4483 [4] NCCL INFO init.cc:872 -> 1"
        ),
        "NVLS|fabric ?manager",
    ),
    Row(
        "aws-samples/aws-deep-learning-ami-ubuntu-dcv-desktop#33",
        PROGRAM,
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda "
            "functions before calling NumCudaDevices() that might have already set an error? "
            "Error 802: system not yet initialized"
        ),
        "fabric ?manager",
    ),
    Row(
        "coqui-ai/TTS#3439",
        PROGRAM,
        (
            "OpenBLAS blas_thread_init: pthread_create failed for thread 35 of 48: Operation not "
            "permitted\n"
            "OpenBLAS blas_thread_init: RLIMIT_NPROC -1 current, -1 max\n"
            "RuntimeError: can't start new thread"
        ),
        "seccomp|Docker.*(old|20\\.10|update|newer)",
    ),
    Row(
        "willsheffler/worms#2",
        PROGRAM,
        (
            "OpenBLAS blas_thread_init: RLIMIT_NPROC 512 current, 1031280 max\n"
            "OpenBLAS blas_thread_init: pthread_create: Resource temporarily unavailable"
        ),
        "process|thread|ulimit -u|pids",
    ),
    Row(
        "pytorch/pytorch#107021",
        PROGRAM,
        (
            "[E socket.cpp:860] [c10d] The client socket has timed out after 60s while trying to "
            "connect to 192.0.0.1:1234\n"
            "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection "
            "to the C10d store has failed. See inner exception for details."
        ),
        "reach|port|firewall|address|connect",
    ),
    Row(
        "NVIDIA-NeMo/Speech#1029",
        ENGINE,
        (
            "failed to register layer: Error processing tar file(exit status 1): write "
            "/opt/conda/lib/python3.6/site-packages/torch/lib/libtorch.so: no space left on "
            "device"
        ),
        "disk|space",
    ),
    Row(
        "nipreps/nibabies#248",
        ENGINE,
        (
            "failed to register layer: ApplyLayer exit status 1 stdout:  stderr: lchown "
            "/opt/freesurfer/ASegStatsLUT.txt: invalid argument"
        ),
        "user IDs",
    ),
    Row(
        "jeroenjanssens/data-science-at-the-command-line#153",
        ENGINE,
        (
            "failed to register layer: write "
            "/usr/local/lib/python3.9/dist-packages/sklearn/ensemble/_gradient_boosting.cpython-3"
            "9-x86_64-linux-gnu.so: input/output error"
        ),
        "disk|space|I/O|input/output",
    ),
    Row(
        "wtdcode/vllm-backport#79",
        ENGINE,
        "unauthorized: authentication required",
        "log ?in|registry|credential|private",
    ),
    Row(
        "kubeflow/trainer#2884",
        PROGRAM,
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
        "compiler|gcc",
    ),
    Row(
        "pytorch/pytorch#103417",
        PROGRAM,
        ("/usr/bin/ld: cannot find -lcuda: No such file or directory\ncollect2: error: ld returned 1 exit status"),
        "libcuda",
    ),
    Row(
        "opendatahub-io/ilab-on-ocp#26",
        PROGRAM,
        "[rank1]: PermissionError: [Errno 13] Permission denied: '/.cache'",
        "HOME|home|XDG|write",
    ),
    Row(
        "dphnAI/sonar#458",
        PROGRAM,
        (
            '  File "/usr/lib/python3.10/os.py", line 225, in makedirs\n'
            "    mkdir(name, mode)\n"
            "PermissionError: [Errno 13] Permission denied: '/app/aphrodite-engine/.triton'"
        ),
        "HOME|TRITON_CACHE_DIR|user|write",
    ),
    Row(
        "huggingface/text-generation-inference#3082",
        PROGRAM,
        (
            "/usr/local/bin/text-generation-launcher: error while loading shared libraries: "
            "libpython3.11.so.1.0: cannot open shared object file: No such file or directory"
        ),
        "libpython3\\.11",
    ),
    Row(
        "modelscope/ms-swift#6695",
        PROGRAM,
        (
            "    os.chmod(indices_cache_file_name, 0o666 & ~umask)\n"
            "OSError: [Errno 116] Stale file handle: '/mnt/cache/x.arrow'"
        ),
        "NFS|file system|stale|other machine",
    ),
    Row(
        "OpenBioML/chemnlp#334",
        PROGRAM,
        (
            "    torch._C._cuda_setDevice(device)\n"
            "RuntimeError: CUDA error: invalid device ordinal\n"
            "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
        ),
        "GPU|LOCAL_RANK|device",
    ),
    Row(
        "unslothai/unsloth#1914",
        PROGRAM,
        (
            "wandb: ERROR api_key not configured (no-tty). call wandb.login(key=[your_api_key])\n"
            "wandb.errors.errors.UsageError: api_key not configured (no-tty). call "
            "wandb.login(key=[your_api_key])"
        ),
        "WANDB_API_KEY|secrets",
    ),
    Row(
        "tdrussell/diffusion-pipe#325",
        PROGRAM,
        (
            "requests.exceptions.ConnectionError: "
            "(MaxRetryError('HTTPSConnectionPool(host=\\'huggingface.co\\', port=443): Max retries "
            "exceeded with url: /api/models/x (Caused by "
            'NameResolutionError("<urllib3.connection.HTTPSConnection object at 0x72271c91bda0>: '
            "Failed to resolve \\'huggingface.co\\' ([Errno -3] Temporary failure in name "
            "resolution)\"))'), '(Request ID: 3e1c)')"
        ),
        "internet|DNS|name|resolve|offline",
    ),
    Row(
        "open-mmlab/mmocr#90",
        PROGRAM,
        "ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
        "libGL|libgl1|opencv-python-headless",
    ),
    Row(
        "TorchDSP/torchsig#238",
        PROGRAM,
        (
            "A module that was compiled using NumPy 1.x cannot be run in\n"
            "NumPy 2.0.0 as it may crash. To support both 1.x and 2.x\n"
            "versions of NumPy, modules must be compiled with NumPy 2.0."
        ),
        "numpy ?<? ?2|NumPy",
    ),
    Row(
        "pytorch/pytorch#40420",
        PROGRAM,
        "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        None,
    ),
    Row(
        "Project-MONAI/tutorials#1665",
        PROGRAM,
        (
            "usage: brats_training_ddp.py [-h] [-d DIR] [--local_rank LOCAL_RANK]\n"
            "brats_training_ddp.py: error: unrecognized arguments: --local-rank=0"
        ),
        "torch.distributed.launch.*torchrun",
        code=2,
    ),
    Row(
        "moby/moby#39841",
        ENGINE,
        ("failed to open the raw stream connection: dial unix /var/run/docker.sock: connect: permission denied"),
        "docker group|group",
    ),
    Row(
        "guanyingc/SDPS-Net#16",
        PROGRAM,
        ("    _error_if_any_worker_fails()\nRuntimeError: DataLoader worker (pid 13904) is killed by signal: Killed. "),
        "memory",
    ),
    Row(
        "eriklindernoren/PyTorch-YOLOv3#650",
        PROGRAM,
        (
            "src/tcmalloc.cc:283] Attempt to free invalid pointer 0x1\n"
            "RuntimeError: DataLoader worker (pid 2256) is killed by signal: Aborted. "
        ),
        "abort|native|library",
    ),
    Row(
        "MhLiao/DB#94",
        PROGRAM,
        ("RuntimeError: DataLoader worker (pid 25902) is killed by signal: Segmentation fault. "),
        "native|library|segmentation|C code",
    ),
    Row(
        "NVIDIA/nvidia-docker#1121",
        ENGINE,
        (
            "OCI runtime create failed: unable to retrieve OCI runtime error (open "
            "/run/containerd/io.containerd.runtime.v1.linux/moby/1038f5ace29c/log.json: no such "
            "file or directory): fork/exec /usr/bin/nvidia-container-runtime: no such file or "
            "directory: unknown"
        ),
        "install the NVIDIA Container Toolkit",
    ),
    Row(
        "NVIDIA/nvidia-container-toolkit#223",
        ENGINE,
        (
            "failed to create shim task: OCI runtime create failed: runc create failed: unable "
            "to start container process: error during container init: error running hook #0: "
            "error running hook: exit status 1, stdout: , stderr: Auto-detected mode as 'legacy'\n"
            "nvidia-container-cli: device error: no-gpu-has-128MiB-to-run: unknown device: "
            "unknown"
        ),
        "unknown|no such|not.*GPU|no-gpu-has",
    ),
    Row(
        "NVIDIA/nvidia-docker#1441",
        ENGINE,
        (
            "OCI runtime create failed: container_linux.go:370: starting container process "
            "caused: process_linux.go:459: container init caused: Running hook #0:: error "
            "running hook: exit status 1, stdout: , stderr: nvidia-container-cli: mount error: "
            "write error: /sys/fs/cgroup/devices/docker/fc84e2a61394f861/devices.allow: "
            "operation not permitted: unknown"
        ),
        "cgroup",
    ),
    Row(
        "Atinoda/text-generation-webui-docker#20",
        ENGINE,
        (
            "failed to create shim task: OCI runtime create failed: runc create failed: unable "
            "to start container process: error during container init: error running hook #0: "
            "error running hook: exit status 1, stdout: , stderr: Auto-detected mode as 'legacy'\n"
            "nvidia-container-cli: initialization error: load library failed: libnvidia-ml.so.1: "
            "cannot open shared object file: no such file or directory: unknown"
        ),
        "Docker Desktop|driver",
    ),
    Row(
        "microsoft/pai#3267",
        ENGINE,
        (
            "OCI runtime create failed: container_linux.go:345: starting container process "
            'caused "process_linux.go:424: container init caused: running prestart hook 0 '
            "caused: error running hook: exit status 1, stdout: , stderr: nvidia-container-cli: "
            "initialization error: cuda error: system has unsupported display driver "
            "combination: unknown"
        ),
        "Container Toolkit failed",  # names no cause, only the command that shows it
    ),
    Row(
        "modelscope/ms-swift#3264",
        PROGRAM,
        (
            "[rank2]:[E225 13:49:33.912673914 ProcessGroupNCCL.cpp:1595] [PG ID 0 PG GUID "
            "0(default_pg) Rank 2] Process group watchdog thread terminated with exception: CUDA "
            "error: an illegal instruction was encountered"
        ),
        "GPU|hardware|kernel",
    ),
    Row(
        "urchade/GLiNER#165",
        PROGRAM,
        (
            "RuntimeError: Expected to have finished reduction in the prior iteration before "
            "starting a new one. This error indicates that your module has parameters that were "
            "not used in producing loss. You can enable unused parameter detection by passing "
            "the keyword argument `find_unused_parameters=True` to "
            "`torch.nn.parallel.DistributedDataParallel`"
        ),
        "find_unused_parameters|not used|unused",
    ),
    Row(
        "NVIDIA/nccl-tests#14",
        PROGRAM,
        (
            "e66aa18dc444:3171:3171 [0] misc/ibvwrap.cu:61 WARN Failed to open libibverbs.so[.1]\n"
            "e66aa18dc444:3171:3171 [0] include/socket.h:311 WARN Socket creation failed : "
            "Address family not supported by protocol\n"
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed "
            "or device error."
        ),
        "interface|NCCL_SOCKET_IFNAME|network|IPv6",
    ),
    Row(
        "NVIDIA/nccl-tests#15",
        PROGRAM,
        ("server1:6601:6625 [0] include/socket.h:385 NCCL WARN Net : Connection closed by remote peer"),
        "peer|other|connection",
    ),
    Row(
        "hiyouga/LlamaFactory#7396",
        PROGRAM,
        (
            "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, "
            "NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 "
            "milliseconds before timing out."
        ),
        "timeout|rank|collective",
    ),
    Row(
        "acids-ircam/RAVE#196",
        PROGRAM,
        (
            "RuntimeError: Error(s) in loading state_dict for RAVE:\n"
            "	size mismatch for prior.0.weight: copying a param with shape torch.Size([128, 16, "
            "3]) from checkpoint, the shape in current model is torch.Size([256, 16, 3])."
        ),
        "checkpoint|model|shape",
    ),
    Row(
        "MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#259",
        PROGRAM,
        ("misc/ibvwrap.cc:0 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"),
        "although memlock is unlimited",
        limited=False,
    ),
]
LATER = [
    Row(
        "hpcaitech/ColossalAI#3582",
        PROGRAM,
        (
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
            "train.py FAILED\n"
            "Root Cause (first observed failure):\n"
            "[0]:\n"
            "  exitcode  : 1 \n"
            "  error_file: <N/A>\n"
            "  traceback : To enable traceback see: "
            "https://pytorch.org/docs/stable/elastic/errors.html"
        ),
        None,
    ),
    Row(
        "pytorch/pytorch#79847",
        PROGRAM,
        (
            "RuntimeError: NCCL error in: "
            "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:891, internal error, NCCL "
            "version 21.0.3\n"
            "ncclInternalError: Internal check failed. This is either a bug in NCCL or due to "
            "memory corruption"
        ),
        None,
    ),
    Row(
        "pytorch/pytorch#135355",
        PROGRAM,
        (
            "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] "
            "ss1.ss_family == ss2.ss_family. 2 vs 10"
        ),
        "IPv6|address",
    ),
    Row(
        "orca3/MiniAutoML#16",
        PROGRAM,
        "ValueError: host not found: Name or service not known",
        "name|resolve|host",
    ),
    Row(
        "open-mmlab/mmsegmentation#3186",
        PROGRAM,
        (
            "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: -7) "
            "local_rank: 0 (pid: 34367) of binary: /usr/bin/python3"
        ),
        "shm|shared memory|bus",
    ),
    Row(
        "gjy3035/C-3-Framework#30",
        PROGRAM,
        ("RuntimeError: DataLoader worker (pid(s) 11208, 3676, 5316, 10956) exited unexpectedly"),
        None,
    ),
    Row(
        "AstarLight/Lets_OCR#46",
        PROGRAM,
        (
            "    _error_if_any_worker_fails()\n"
            "RuntimeError: DataLoader worker (pid 2918) exited unexpectedly with exit code 1."
        ),
        None,
    ),
    Row(
        "hpcaitech/Open-Sora#815",
        PROGRAM,
        (
            "[rank0]:     raise RuntimeError(f'DataLoader worker (pid(s) {pids_str}) exited "
            "unexpectedly') from e\n"
            "[rank0]: RuntimeError: DataLoader worker (pid(s) 8864) exited unexpectedly\n"
            "[rank0]:[W617 03:17:50.058147529 ProcessGroupNCCL.cpp:1168] Warning: WARNING: "
            "process group has NOT been destroyed before we destruct ProcessGroupNCCL."
        ),
        None,
    ),
    Row(
        "isri-aist/BaselineWalkingController#21",
        ENGINE,
        'could not select device driver "" with capabilities: [[gpu]].',
        "cannot give GPUs.*Container Toolkit",
    ),
    Row(
        "NVIDIA/nvidia-docker#1146",
        ENGINE,
        (
            "OCI runtime create failed: container_linux.go:346: starting container process "
            'caused "process_linux.go:449: container init caused \\"process_linux.go:432: running '
            'prestart hook 0 caused \\\\\\"error running hook: exit status 1, stdout: , stderr: '
            "nvidia-container-cli: mount error: write error: "
            "/sys/fs/cgroup/devices/docker/b2b586a52a08/devices.allow: operation not permitted"
        ),
        "cgroup",
    ),
    Row(
        "AbdBarho/stable-diffusion-webui-docker#406",
        ENGINE,
        (
            "failed to create shim task: OCI runtime create failed: runc create failed: unable "
            "to start container process: error during container init: error running hook #0: "
            "error running hook: exit status 1, stdout: , stderr: Auto-detected mode as 'legacy'\n"
            "nvidia-container-cli: initialization error: load library failed: libnvidia-ml.so.1: "
            "cannot open shared object file: no such file or directory: unknown"
        ),
        "Docker Desktop",
    ),
    Row(
        "huggingface/text-generation-inference#894",
        ENGINE,
        (
            "failed to create shim task: OCI runtime create failed: runc create failed: unable "
            "to start container process: error during container init: error running hook #0: "
            "error running hook: exit status 1, stdout: , stderr: Auto-detected mode as 'legacy'\n"
            "nvidia-container-cli: initialization error: load library failed: libnvidia-ml.so.1: "
            "cannot open shared object file: no such file or directory: unknown"
        ),
        "Docker Desktop",
    ),
]

JUDGED = [
    Row(
        "pytorch/examples#689",
        PROGRAM,
        (
            "id-d3:714:714 [0] misc/ibvwrap.cu:63 NCCL WARN Failed to open libibverbs.so[.1]\n"
            "NCCL version 2.4.2+cuda9.0\n"
            "id-d3:715:790 [1] include/socket.h:382 NCCL WARN Connect to 172.18.0.1<49273> failed : "
            "Connection refused\n"
            "Traceback (most recent call last):\n"
            '  File "dis_train.py", line 120, in main\n'
            "    mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))\n"
            "Exception:\n"
            "\n"
            "-- Process 1 terminated with the following error:"
        ),
        "network|interface|address",
    ),
    Row(
        "huggingface/pytorch-image-models#1724",
        PROGRAM,
        (
            "usage: train.py [-h] [--data-dir DIR] [--dataset NAME] [--local_rank LOCAL_RANK] "
            "[--use-multi-epochs-loader] [--log-wandb]\n"
            "                [DIR]\n"
            "train.py: error: unrecognized arguments: --local-rank=2"
        ),
        "torch.distributed.launch.*torchrun",
        code=2,
    ),
    Row(
        "Arthur151/ROMP#230",
        PROGRAM,
        "/z/home/env/romp/bin/python: can't open file 'romp.train': [Errno 2] No such file or directory",
        r"module|-m\b",
    ),
    Row(
        "open-mmlab/mmpretrain#960",
        PROGRAM,
        (
            "  File "
            '"/opt/conda/lib/python3.7/site-packages/torch/distributed/elastic/rendezvous/static_tcp_'
            'rendezvous.py", line 55\n'
            "    self._store = TCPStore(  # type: ignore[call-arg]\n"
            "RuntimeError: The server socket has failed to listen on any local network address. The "
            "server socket has failed to bind to [::]:22 (errno: 98 - Address already in use). The "
            "server socket has failed to bind to 0.0.0.0:22 (errno: 98 - Address already in use)."
        ),
        r"port 22 is in use|\bsshd",
    ),
    Row(
        "meta-pytorch/torchtune#392",
        PROGRAM,
        (
            "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
            "network address. The server socket has failed to bind to [::]:29500 (errno: 98 - "
            "Address already in use). The server socket has failed to bind to 0.0.0.0:29500 (errno: "
            "98 - Address already in use)."
        ),
        "port 29500 is in use.*your other runs",
    ),
    Row(
        "wandb/wandb#5217",
        PROGRAM,
        (
            '  File "/yes/envs/titan/lib/python3.9/multiprocessing/queues.py", line 43, in __init__\n'
            "    self._rlock = ctx.Lock()\n"
            '  File "/yes/envs/titan/lib/python3.9/multiprocessing/synchronize.py", line 57, in __init__\n'
            "    sl = self._semlock = _multiprocessing.SemLock(\n"
            "OSError: [Errno 28] No space left on device"
        ),
        "^shared memory",
    ),
    Row(
        "Plachtaa/VITS-fast-fine-tuning#397",
        PROGRAM,
        (
            "  File "
            '"/root/miniconda3/envs/vits/lib/python3.8/site-packages/torch/multiprocessing/spawn.py",'
            " line 182, in start_processes\n"
            "    error_queue = mp.SimpleQueue()\n"
            '  File "/root/miniconda3/envs/vits/lib/python3.8/multiprocessing/synchronize.py", line '
            "57, in __init__\n"
            "    sl = self._semlock = _multiprocessing.SemLock(\n"
            "OSError: [Errno 28] No space left on device"
        ),
        "^shared memory",
    ),
    Row(
        "NVIDIA/nccl#342",
        PROGRAM,
        (
            "include/shm.h:28 NCCL WARN Call to posix_fallocate failed: No space left on device\n"
            "include/shm.h:48 NCCL WARN Error while creating shared memory segment "
            "nccl-shm-recv-250a7cc850ba9298-0-1-3 (size 9637888)"
        ),
        "^shared memory",
    ),
    Row(
        "RobinWu218/SimDINO#15",
        PROGRAM,
        (
            '[rank0]:     raise RuntimeError("Failed to find C compiler. Please specify via CC '
            'environment variable.")\n'
            "[rank0]: RuntimeError: Failed to find C compiler. Please specify via CC environment variable.\n"
            "srun: error: gpu1-3: task 0: Exited with exit code 1"
        ),
        "compiler",
    ),
    Row(
        "xljh0520/JOTR#4",
        PROGRAM,
        (
            "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running "
            "inconsistent collective: CollectiveFingerPrint(OpType=ALLGATHER, TensorShape=[41, 256, "
            "8, 8, 8], TensorDtypes=Float)"
        ),
        "sizes|shape",
    ),
    Row(
        "AIR-DISCOVER/ICRA2024-Sim2Real-AXS#5",
        PROGRAM,
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda "
            "functions before calling NumCudaDevices() that might have already set an error? Error "
            "804: forward compatibility was attempted on non supported HW"
        ),
        "too old for the image -> update the driver",
    ),
    Row(
        "CompVis/stable-diffusion#439",
        PROGRAM,
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda "
            "functions before calling NumCudaDevices() that might have already set an error? Error "
            "803: system has unsupported display driver / cuda driver combination"
        ),
        "libcuda.*LD_LIBRARY_PATH",
    ),
    Row(
        "clessig/atmorep#77",
        PROGRAM,
        (
            "torch.distributed.DistBackendError: NCCL error in: "
            "../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, invalid usage (run with "
            "NCCL_DEBUG=WARN for details), NCCL version 2.21.5\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
            "Last error:\n"
            "Duplicate GPU detected : rank 3 and rank 0 both on CUDA device 3000"
        ),
        "same GPU",
    ),
    Row(
        "hiyouga/LlamaFactory#2424",
        PROGRAM,
        (
            "Running tokenizer on dataset:   9%| 280000/2969526 [29:55<4:48:08, 155.57 examples/s][E "
            "ProcessGroupNCCL.cpp:475] [Rank 2] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran "
            "for 1800328 milliseconds before timing out.\n"
            "[E ProcessGroupNCCL.cpp:489] Some NCCL operations have failed or timed out. Due to the "
            "asynchronous nature of CUDA kernels, subsequent GPU operations might run on "
            "corrupted/incomplete data."
        ),
        "late.*timeout=",
    ),
    Row(
        "kohya-ss/sd-scripts#1434",
        PROGRAM,
        (
            "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
            "CUDA kernel errors might be asynchronously reported at some other API call, so the "
            "stacktrace below might be incorrect.\n"
            "[E ProcessGroupNCCL.cpp:916] [Rank 1] NCCL watchdog thread terminated with exception: "
            "CUDA error: uncorrectable ECC error encountered"
        ),
        "hardware",
    ),
    Row(
        "facebookincubator/submitit#1708",
        PROGRAM,
        (
            "submitit WARNING (2022-08-12 02:06:11,453) - Caught signal SIGUSR2 on SERVER_NAME: this "
            "job is preempted.\n"
            "slurmstepd: error: *** JOB 608 ON SERVER_NAME CANCELLED AT 2022-08-12T02:06:12 DUE TO "
            "JOB REQUEUE ***\n"
            "slurmstepd: error: Failed to send MESSAGE_TASK_EXIT: Connection refused\n"
            "srun: error: SERVER_NAME: tasks 2-3: Exited with exit code 1"
        ),
        "requeue",
    ),
    Row(
        "ArjunaCluster/ArjunaUsers#52",
        PROGRAM,
        (
            "/var/spool/slurmd/job00191/slurm_script: line 28:  8156 Killed                  python3 "
            "main.py --prop hform\n"
            "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=191.batch cgroup. Some of "
            "your processes may have been killed by the cgroup out-of-memory handler."
        ),
        "^(was killed: )?out of memory",
    ),
    Row(
        "xyz9911/FLAME#2",
        PROGRAM,
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't "
            "find it in the cached files and it looks like xyz9911/FLAME-init is not the path to a "
            "directory containing a file named config.json.\n"
            "Checkout your internet connection or see how to run the library in offline mode at "
            "'https://huggingface.co/docs/transformers/installation#offline-mode'."
        ),
        None,
    ),
    Row(
        "bmaltais/kohya_ss#859",
        PROGRAM,
        (
            "2023-05-27 17:34:51.258871: I tensorflow/core/platform/cpu_feature_guard.cc:193] This "
            "TensorFlow binary is optimized with oneAPI Deep Neural Network Library (oneDNN) to use "
            "the following CPU instructions in performance-critical operations:  AVX2 AVX512F "
            "AVX512_VNNI FMA\n"
            "To enable them in other operations, rebuild TensorFlow with the appropriate compiler flags.\n"
            "PermissionError: [Errno 13] Permission denied: '/home/appuser/.cache/huggingface'"
        ),
        "may not write|HF_HOME",
    ),
    Row(
        "layumi/Person_reID_baseline_pytorch#214",
        PROGRAM,
        (
            "  File "
            '"/home/zhuda/anaconda3/lib/python3.7/site-packages/torchvision/datasets/folder.py", '
            "line 121, in _find_classes\n"
            "    classes = [d.name for d in os.scandir(dir) if d.is_dir()]\n"
            "FileNotFoundError: [Errno 2] No such file or directory: 'your_data_path/train_all'"
        ),
        "path",
    ),
    Row(
        "hugohadfield/pytorch_image_regression#1",
        PROGRAM,
        (
            '  File "/usr/local/lib/python3.8/dist-packages/torchvision/datasets/folder.py", line '
            "42, in find_classes\n"
            '    raise FileNotFoundError(f"Couldn\'t find any class folder in {directory}.")\n'
            "FileNotFoundError: Couldn't find any class folder in /mnt/shared/Gary/motionTrain/train."
        ),
        "folder (per|for each) class",
    ),
    Row(
        "LiyuanLucasLiu/LM-LSTM-CRF#27",
        PROGRAM,
        (
            "/pytorch/torch/lib/THCUNN/ClassNLLCriterion.cu:101: block: [0,0,0], thread: [2,0,0] Assertion "
            "t >= 0 && t < n_classes failed.\n"
            "THCudaCheck FAIL file=/pytorch/torch/lib/THC/generated/../THCReduceAll.cuh line=339 error=59 : "
            "device-side assert triggered\n"
            "RuntimeError: cuda runtime error (59) : device-side assert triggered at "
            "/pytorch/torch/lib/THC/generated/../THCReduceAll.cuh:339"
        ),
        "label|class",
    ),
    Row(
        "Lightning-AI/litData#442",
        PROGRAM,
        (
            '  File "/home/zeus/lib/python3.10/site-packages/torch/nn/functional.py", line 2500, in '
            "_verify_batch_size\n"
            "ValueError: Expected more than 1 value per channel when training, got input size "
            "torch.Size([1, 256, 1, 1])"
        ),
        "last batch",
    ),
    Row(
        "zju3dv/NeuralRecon#91",
        PROGRAM,
        (
            "RuntimeError: Too many open files. Communication with the workers is no longer "
            "possible. Please increase the limit using `ulimit -n` in the shell or change the "
            "sharing strategy by calling `torch.multiprocessing.set_sharing_strategy('file_system')` "
            "at the beginning of your code"
        ),
        "open files",
    ),
    Row(
        "THU-MIG/yolov10#306",
        PROGRAM,
        (
            "ImportError: "
            "/root/.local/conda/envs/yolov10/lib/python3.9/site-packages/torch/lib/libtorch_cuda.so: "
            "undefined symbol: ncclCommRegister"
        ),
        "NCCL",
    ),
    Row(
        "galilai-group/stable-pretraining#388",
        PROGRAM,
        (
            "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do "
            "so you have two options, do those steps only if you trust the source of the checkpoint.\n"
            "\tWeightsUnpickler error: Unsupported global: GLOBAL omegaconf.listconfig.ListConfig was "
            "not an allowed global by default."
        ),
        "weights_only",
    ),
    Row(
        "NVIDIA/nvidia-container-toolkit#679",
        ENGINE,
        (
            "failed to create task for container: failed to create shim task: OCI runtime create "
            "failed: runc create failed: unable to start container process: error during container "
            "init: error running hook #0: error running hook: exit status 1, stdout: , stderr: "
            "Auto-detected mode as 'legacy'\n"
            "nvidia-container-cli: initialization error: change root failed: no such file or "
            "directory: unknown."
        ),
        "Container Toolkit failed",
    ),
    Row(
        "getumbrel/llama-gpt#132",
        ENGINE,
        (
            "failed to create task for container: failed to create shim task: OCI runtime create "
            "failed: runc create failed: unable to start container process: error during container "
            "init: error running hook #0: error running hook: exit status 1, stdout: , stderr: "
            "Auto-detected mode as 'legacy'\n"
            "nvidia-container-cli: detection error: nvml error: unknown error: unknown"
        ),
        "Container Toolkit failed",
    ),
    Row(
        "hpcac/2023-APAC-HPC-AI#1",
        PROGRAM,
        (
            "subprocess.CalledProcessError: Command 'ssh -o PasswordAuthentication=no "
            "gadi-gpu-v100-0011 hostname' returned non-zero exit status 255.\n"
            "\n"
            "During handling of the above exception, another exception occurred:\n"
            "\n"
            "Traceback (most recent call last):\n"
            "  File "
            '"/scratch/zs99/dz9214/BLOOM/deepspeed073/p38/lib/python3.8/site-packages/deepspeed/launc'
            'her/runner.py", line 407, in main\n'
            "    raise RuntimeError(\n"
            "RuntimeError: Using hostfile at /home/552/dz9214/hostfile but host=gadi-gpu-v100-0011 "
            "was not reachable via ssh. If you are running with a single node please remove "
            "/home/552/dz9214/hostfile or setup passwordless ssh."
        ),
        "deepspeed",
    ),
    Row(
        "ZhengYinan-AIR/Diffusion-Planner#65",
        PROGRAM,
        (
            "RuntimeError: Expected to have finished reduction in the prior iteration before "
            "starting a new one. This error indicates that your module has parameters that were not "
            "used in producing loss."
        ),
        "find_unused",
    ),
]

MISLED = [
    Row(
        "NVIDIA/nccl#1284",
        PROGRAM,
        (
            "[E ProcessGroupNCCL.cpp:475] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=77, OpType=BROADCAST, Timeout(ms)=1800000) ran for 1800572 milliseconds "
            "before timing out.\n"
            "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory."
        ),
        "^communication with its peers timed out",
    ),
    Row(
        "greatlog/UnpairedSR#17",
        PROGRAM,
        (
            "RuntimeError: DataLoader worker (pid 16757) is killed by signal: Bus error. It is "
            "possible that dataloader's workers are out of shared memory. Please try to raise your "
            "shared memory limit."
        ),
        "bus error.*or a file that is mapped",
    ),
    Row(
        "graphdeco-inria/gaussian-splatting#456",
        PROGRAM,
        (
            '  File "/research/gaussian-splatting/gaussian_renderer/network_gui.py", line 30, in init\n'
            "    listener.bind((host, port))\n"
            "OSError: [Errno 98] Address already in use"
        ),
        None,
    ),
    Row(
        "Liuziyu77/Visual-RFT#123",
        PROGRAM,
        ("torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/3 clients joined."),
        "ended or be late",
    ),
]
