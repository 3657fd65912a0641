"""The table of faults: what is recognised, and the same words from elsewhere, to which no rule applies."""

from __future__ import annotations

import errno
import re
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.container_scripts.words import error_line, lost_peer
from launcher.faults import disk
from launcher.faults.cause import Cause
from launcher.faults.lookup import cause_of_output, cause_of_report
from launcher.faults.table import ENGINE, IMAGE, RULES, SIGNAL, SMI, UNLIMITED
from launcher.records.store import NodeOfRun
from launcher.run.end.diagnose import is_victim
from launcher.run.end.evidence import Evidence, collective_failed
from launcher.run.watch.attempts import Attempt
from tests.failures import first_failure
from tests.gpu_rows import FAULTS, RECORDED, TOOLKIT, output
from tests.unit.test_diagnose import OWN, evidence, state


@pytest.mark.parametrize(
    "words",
    [
        "tee: /output/logs/gpu-a.log: No space left on device",
        "sh: 1: echo: echo: I/O error: Disk quota exceeded",
        "sh: write error: Quota exceeded",  # musl
        "cp: /Volumes/x: Disc quota exceeded",  # macOS
        "OSError: [Errno 28] No space left on device: '/output/x'",
        "OSError: [Errno 122] Disk quota exceeded",
        "OSError: [Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device",
        "SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)",
        'IoError(Os { code: 122, kind: Other, message: "..." })',
        "OSError: Can't write data (file write failed: errno = 28, error message = '...')",
        "sqlite3.OperationalError: database or disk is full",
        "E: You don't have enough free space in /var/cache/apt/archives/.",
        "write /var/lib/docker/tmp/GetImageBlob1: no space left on device",
        "tar: model.pt: Cannot write: No space left on device",
    ],
)
def test_a_full_disk_is_recognised_in_every_wording(words: str) -> None:
    assert disk.is_full(words)


@pytest.mark.parametrize(
    "words", ["429 Quota exceeded for requests", "error 28", "[Errno 13] Permission denied", "code: 28", ""]
)
def test_other_words_are_no_full_disk(words: str) -> None:
    assert not disk.is_full(words)


def test_an_error_of_this_machine_is_judged_by_its_number() -> None:
    assert disk.is_full(OSError(errno.EDQUOT, "in another language"))
    assert not disk.is_full(OSError(errno.EACCES, "no space left on device"))


# --- who lost a peer

ENDS = sorted(Path(__file__).with_name("tracebacks").iterdir())  # of two ranks with torch 2.14 and gloo, peers killed


def read(end: str) -> str:
    return Path(__file__).with_name("tracebacks").joinpath(f"{end}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("end", [file.stem for file in ENDS])
def test_a_victim_is_who_lost_its_peer_in_torch_distributed(end: str) -> None:
    assert is_victim(evidence(0, read(end))) == end.startswith("victim-")


@pytest.mark.parametrize("own", [file.stem for file in ENDS if file.stem.startswith("own-")])
def test_a_ranks_own_error_is_the_first_failure_whatever_its_words_are(own: str) -> None:
    """It ended last: the others noticed it before torchrun stopped it."""
    others = [evidence(0, read("victim-collective"), finished=1.0), evidence(2, "step 3\n", 0, finished=2.0)]
    found = first_failure([*others, evidence(1, read(own), finished=3.0)])
    assert found is not None
    assert (found.node, found.cure) == ("n1", "")
    assert "exited with code 1" in found.what


RAISED = 'Traceback (most recent call last):\n  File "/workspace/code/train.py", line 9, in <module>\n'
INSIDE = RAISED + '  File "/opt/venv/lib/python3.11/site-packages/torch/{}", line 83, in call\n    call()\n'
NCCL = "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, "
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
LOST = INSIDE.format("distributed/distributed_c10d.py") + (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:38032\n"
)
REFUSED = RAISED + "ConnectionRefusedError: [Errno 111] Connection refused\n"


@pytest.mark.parametrize(
    "end",
    [
        # https://github.com/NVIDIA/nccl/issues/2076
        f"{RAISED}{NCCL}remote process exited or there was a network error, NCCL version 2.21\nncclRemoteError: ...\n",
        # https://github.com/NVIDIA/nccl/issues/1514
        "".join(
            f"[rank1]: {line}\n"
            for line in f"{RAISED}{NCCL}internal error\nLast error:\nNet : Connection closed by remote peer".split("\n")
        ),
        # https://github.com/tatsu-lab/stanford_alpaca/issues/207: no traceback
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  NCCL error: remote process "
        "exited or there was a network error, NCCL version 2.14.3\n",
        "terminate called after throwing an instance of 'gloo::IoException'\n"
        "  what():  [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:38032\n",
        "[rank0]:[E504 22:44:08.3 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: W\n",
        # https://github.com/tdrussell/diffusion-pipe/issues/333
        "[rank6]:[W729 10:15:17.5 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=7, remote=[gpu-a]:29500): "
        "Connection reset by peer\n",
        # https://github.com/pytorch/pytorch/issues/76913: torch 1.11 had no class for it
        INSIDE.format("distributed/rendezvous.py") + "RuntimeError: Connection reset by peer\n",
        RAISED + "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15\n",
        LOST + "\nThe above exception was the direct cause of the following exception:\n\n" + OWN,
        LOST + HANDLING + OWN,  # while it saved what it had
        RAISED + "StopIteration\n" + HANDLING + LOST,  # the end of a loader; then a collective
        LOST + "Exception in thread Thread-3 (upload):\n" + REFUSED,
        INSIDE.format("distributed/distributed_c10d.py")
        + "RuntimeError: [../gloo/transport/tcp/pair.cc:589] Read error [10.0.0.2]:2: No route to host\n",
        RAISED + "RuntimeError: NCCL communicator was aborted on rank 1. Original reason for failure was: Watchdog "
        "caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE) ran for 1800116 milliseconds.\n",
        # nccl2 of torch 2.15, in loss.backward()
        INSIDE.format("autograd/graph.py")
        + "RuntimeError: NCCL AllReduce failed: remote process exited or there was a network error \n"
        "NCCL Last Error: Net : Connection closed by remote peer gpu-b<38032>\n",
        INSIDE.format("autograd/graph.py")
        + "RuntimeError: Watchdog caught collective operation timeout: NCCL operation timed out\n",
        # in loss.backward()
        INSIDE.format("autograd/graph.py")
        + "RuntimeError: [../gloo/transport/tcp/pair.cc:589] Read error [10.0.0.2]:2: Connection reset by peer\n",
    ],
)
def test_other_ends_of_victims(end: str) -> None:
    assert is_victim(evidence(0, end))


@pytest.mark.parametrize(
    "end",
    [
        REFUSED,
        RAISED + "RuntimeError: Connection reset by peer\n",
        RAISED + "botocore.exceptions.EndpointConnectionError: Connection refused\n",
        "wandb: ERROR Connection refused\n",
        OWN + HANDLING + LOST,  # a collective in `finally`
        INSIDE.format("utils/data/_utils/pin_memory.py") + "ConnectionResetError: [Errno 104] Connection reset\n",
        INSIDE.format("distributed/checkpoint/filesystem.py") + "OSError: Broken pipe\n",
        INSIDE.format("distributed/distributed_c10d.py") + "ValueError: Default process group is not initialized\n",
        RAISED + "RuntimeError: upload of the NCCL error report: Connection reset by peer\n",
        RAISED + "__main__.GlooError: Connection closed by peer\n",
        "[W1125 16:43:20.7 socket.cpp:697] [c10d] The client socket has failed to connect to [gpu-a]:29500 (errno: 111 "
        "- Connection refused).\nno training data in /data\n",
        OWN + "Exception ignored in: <function Run.__del__ at 0x7f>\n" + LOST,
    ],
)
def test_words_alone_make_no_victim(end: str) -> None:
    assert not lost_peer(end)
    assert not is_victim(evidence(0, end))


def test_a_rank_that_exited_is_told_to_call_the_same_collectives_only_after_one() -> None:
    for end, fix in (("victim-collective", "the same collectives"), ("victim-store-get", "")):
        found = first_failure([evidence(0, read(end)), evidence(1, "step 3\n", 0)])
        assert found is not None
        assert (found.node, found.exit_code) == ("n1", 0)
        assert fix in found.cure
        assert bool(fix) == bool(found.cure)


REPORT = """train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-25_16:41:16
  host      : gpu-a
  rank      : 1 (local_rank: 1)
  exitcode  : -15 (pid: 8)
  error_file: <N/A>
[2]:
  time      : 2026-11-25_16:41:16
  host      : gpu-a
  rank      : 2 (local_rank: 2)
  exitcode  : {} (pid: 9)
  error_file: <N/A>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-25_16:41:16
  host      : gpu-a
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 7)
  error_file: <N/A>
============================================================
"""


@pytest.mark.parametrize(
    ("code", "own", "rank", "what"),
    [
        (1, read("own-requests-refused"), 2, "exited with code 1"),
        (-11, "step 3\n", 2, "was killed by SIGSEGV"),
        (1, read("victim-ddp"), 0, "exited with code 1"),
    ],
)
def test_of_a_nodes_ranks_the_one_that_lost_no_peer_is_named(code: int, own: str, rank: int, what: str) -> None:
    """torchrun calls the first that it observed the root cause, of all that ended between two looks."""
    logs = {0: read("victim-collective"), 1: "step 3\n", 2: own}
    node = NodeOfRun("n0", "n0", 0, "c", "/o", range(3))
    found = first_failure([Evidence(node, state(1), REPORT.format(code), None, logs)])
    assert found is not None
    assert found.rank == rank
    assert found.what.startswith(what)


STARTER = """Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/accelerate/commands/launch.py", line 1168, in simple_launcher
    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)
subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 1.
"""


def prefixed(rank: int, end: str) -> str:
    return "".join(f"[rank{rank}]: {line}\n" if line else "\n" for line in end.splitlines())


@pytest.mark.parametrize(
    ("log", "victim"),
    [
        (LOST + STARTER, True),
        (REFUSED + STARTER, False),
        (prefixed(0, LOST) + prefixed(1, REFUSED) + prefixed(2, LOST) + STARTER, False),
        (prefixed(0, LOST) + prefixed(1, LOST), True),
        (REFUSED + prefixed(0, LOST), True),  # the first was handled
        (STARTER, False),
    ],
)
def test_the_ranks_of_a_command_are_told_apart_in_one_log(log: str, victim: bool) -> None:
    """`accelerate launch` and torchrun as `run.command`: their own traceback is the last one."""
    node = NodeOfRun("n0", "n0", 0, "c", "/o", range(1))
    assert is_victim(Evidence(node, state(1), log, None, {})) == victim


def test_only_gloo_and_nccl_say_that_a_collective_was_not_joined() -> None:
    mismatch = "what():  [enforce fail at /gloo/gloo/transport/tcp/pair.cc:464] op.preamble.length <= op.nbytes. 9 vs 4"
    assert collective_failed([evidence(0, mismatch)])
    assert collective_failed([evidence(0, read("victim-timeout"))])
    assert not collective_failed([evidence(0, f"{RAISED}CameraError: Timed out waiting 20ms for recv of a frame\n")])


# --- known causes

KNOWN = {"node": "n0", "port": "29500", "place": IMAGE, "output": "/output"}
IN_USE = "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
WHERE = INSIDE.format("distributed/rendezvous.py")
# (what a program printed, the cause, the fix, its exit code)
APPLIES = [
    (f"{RAISED}RuntimeError: CUDA error: out of memory", "the GPU has no memory left", "status --nodes n0", 1),
    (
        f"{RAISED}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 802.00 MiB.",  # no error 802
        "out of GPU memory",
        "batch size",
        1,
    ),
    (
        f"{RAISED}torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error\nLast error:\n"
        "socketStartConnect: Connect to 10.0.0.2<5> failed : No route to host",
        "a node does not reach another one",
        "doctor JOB",
        1,
    ),
    (
        f"{RAISED}RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "or an extension that the program calls, has no kernels",
        "TORCH_CUDA_ARCH_LIST",
        1,
    ),
    (
        f"{RAISED}pynvml.NVMLError_LibRmVersionMismatch: RM has detected an NVML/RM version mismatch.",
        "the NVIDIA driver was updated",
        "reboot the node",
        1,
    ),
    (read("victim-timeout"), "communication with its peers timed out", "doctor", 1),
    (
        "usage: main.py [-h] [--batch_size N]\nmain.py: error: unrecognized arguments: --lr 1 --batch-size 8\n",
        "unrecognized arguments: --lr 1 --batch-size 8",
        "args: {--batch_size: VALUE}",
        2,
    ),
    (
        "usage: python -m app.main [-h] --batch_size N\n"
        "python -m app.main: error: the following arguments are required: --batch_size\n",
        "the following arguments are required: --batch_size",
        "args: {--batch_size: VALUE}",
        2,
    ),
    (
        "usage: train.py [-h] [--local_rank LOCAL_RANK]\ntrain.py: error: unrecognized arguments: --local-rank=1\n",
        "--local-rank, which torch.distributed.launch passes",
        "torchrun",
        2,
    ),
    (read("victim-no-clients"), "not all nodes met at the rendezvous", "doctor", 1),
    (
        f"{WHERE}torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of "
        "(10.0.0.1, 29500).",
        "not all nodes met at the rendezvous",
        "doctor",
        1,
    ),
    (
        f"{WHERE}{IN_USE}port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "the rendezvous port 29500 is in use",
        "--set port",
        1,
    ),
    (
        f"{WHERE}RuntimeError: The server socket has failed to listen on any local network address. The server socket "
        "has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
        "the rendezvous port 29500 is in use",
        "--set port",
        1,
    ),
    (
        f"{RAISED}RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
        "/dev/shm",
        "remount",
        1,
    ),
    (
        f"{RAISED}RuntimeError: unable to write to file </torch_29919_1>: No space left on device (28)",
        "/dev/shm",
        "remount",
        1,
    ),
    (f"{RAISED}OSError: [Errno 28] No space left on device: '/dev/shm/x'", "/dev/shm", "remount", 1),
    (f"{RAISED}OSError: [Errno 28] No space left on device", "the disk is full", "launcher clean", 1),
    (
        f"{RAISED}OSError: [Errno 122] Disk quota exceeded: '/output/a'",
        "the quota on the output folder's disk is used up",
        "launcher clean",
        1,
    ),
    (f"{RAISED}OSError: [Errno 122] Disk quota exceeded", "the quota on the disk is used up", "quota -s", 1),
    (f"{RAISED}OSError: [Errno 28] No space left on device: '/tmp/a'", "the disk is full, at /tmp/a", "clean", 1),
    ("tee: /output/a: No space left on device", "the output folder's disk is full", "launcher clean", 1),
    (
        "train: error: /output/checkpoints/last.pt.tmp could not be written: No space left on device",
        "the output folder's disk is full",
        "launcher clean",
        2,
    ),
    (
        f"{RAISED}ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
        "the image lacks the library libGL.so.1",
        "apt-get install -y libgl1",
        1,
    ),
    (f"{RAISED}OSError: libodd.so.3: cannot open shared object file: No such", "lacks the library libodd.so.3", "", 1),
    (
        "./sim: error while loading shared libraries: libgomp.so.1: cannot open shared object file: No such file",
        "lacks the library libgomp.so.1",
        "libgomp1",
        127,
    ),
    (f"{RAISED}ModuleNotFoundError: No module named 'timm'", "there is no module timm", "image.packages", 1),
    (
        f"{RAISED}ModuleNotFoundError: No module named 'distutils'",
        "distutils, which is a part of Python in other",
        "",
        1,
    ),
    (
        f"{RAISED}ModuleNotFoundError: No module named 'tomllib'\n\nDuring handling of the above exception, another "
        f"exception occurred:\n\n{RAISED}ModuleNotFoundError: No module named 'tomli'",
        "there is no module tomli",
        "image.packages",
        1,
    ),
    (
        f"{RAISED}ModuleNotFoundError: No module named 'flash_attn'\n\nDuring handling of the above exception, another "
        f"exception occurred:\n\n{RAISED}ImportError: pip install flash-attn",
        "there is no module flash_attn",
        "image.packages",
        1,
    ),
    (f"{RAISED}OSError: [Errno 24] Too many open files: '/data/a'", "too many open files", "sharing_strategy", 1),
    (f"{RAISED}ModuleNotFoundError: No module named 'timm.layers'", "there is no module timm.layers", "", 1),
    ("/usr/bin/python3: No module named train", "there is no module train", "`code`", 1),
    ("env: \u2018./train.sh\u2019: Permission denied", "./train.sh is not executable", "chmod +x", 126),
    (
        "env: './train.sh': Permission denied",
        "./train.sh is not executable",
        "chmod +x ./train.sh, or start it with its interpreter: command: [bash, train.sh]",
        126,
    ),
    ("sh: 1: exec: bin/run: Permission denied", "bin/run is not executable", "chmod +x bin/run", 126),
    ("exec /bin/sh: exec format error", "architecture", "build", 1),
    ("exec /app/start.sh: exec format error", "/app/start.sh has no line `#!` at its start, or the image", "build", 1),
    # click 8.5 and 8.1, typer 0.29, jsonargparse 4.53
    (
        "Usage: c.py [OPTIONS]\nTry 'c.py --help' for help.\n\n"
        "Error: No such option '--batch-size'. Did you mean '--batch_size'?\n",
        "No such option '--batch-size'. Did you mean '--batch_size'?",
        "args: {--batch_size: VALUE}",
        2,
    ),
    (
        "Usage: c.py [OPTIONS]\nTry 'c.py --help' for help.\n\nError: No such option: --batch-size\n",
        "No such option: --batch-size",
        "args: {--batch_size: VALUE}",
        2,
    ),
    (
        "Usage: t.py [OPTIONS]\nTry 't.py --help' for help.\n\u256d\u2500 Error \u2500\u2500\u2500\u2500\u256e\n"
        "\u2502 No such option: --batch-size  \u2502\n\u2570\u2500\u2500\u2500\u2500\u256f\n",
        "No such option: --batch-size",
        "args: {--batch_size: VALUE}",
        2,
    ),
    (
        "Usage: c.py [OPTIONS]\nTry 'c.py --help' for help.\n\nError: Missing option '--batch_size'.\n",
        "Missing option '--batch_size'",
        "args: {--batch_size: VALUE}",
        2,
    ),
    (
        "usage: j.py [--config CONFIG] [--batch_size N]\ntip: For details of accepted options run: j.py --help\n"
        "error: unrecognized arguments: --batch-size=1\n",
        "unrecognized arguments: --batch-size=1",
        "args: {--batch_size: VALUE}",
        2,
    ),
    (
        f"fatal: not a git repository (or any of the parent directories): .git\n{RAISED}"
        "subprocess.CalledProcessError: Command '['git', 'rev-parse', 'HEAD']' returned non-zero exit status 128.",
        ".git is never sent",
        "git rev-parse HEAD",
        1,
    ),
    (
        f"{RAISED}subprocess.CalledProcessError: Command 'git describe --tags' returned non-zero exit status 128.",
        ".git is never sent",
        "--set env.COMMIT",
        1,
    ),
    ("fatal: not a git repository (or any parent up to mount point /)\n", ".git is never sent", "env.COMMIT", 128),
    (f"{RAISED}git.exc.InvalidGitRepositoryError: /workspace/code", ".git is never sent", "env.COMMIT", 1),
    (
        f"{RAISED}LookupError: setuptools-scm was unable to detect version for /workspace/code.",
        ".git is never sent",
        "env.COMMIT",
        1,
    ),
    (
        f"{RAISED}FileNotFoundError: [Errno 2] No such file or directory: 'git'",
        "no program git, and no git repository either",
        "env.COMMIT",
        1,
    ),
    (
        f"{RAISED}importlib.metadata.PackageNotFoundError: No package metadata was found for my_pkg",
        "the package my_pkg is not installed",
        "the code is copied, not installed",
        1,
    ),
    (
        f"{RAISED}pkg_resources.DistributionNotFound: The 'my-pkg' distribution was not found and is required by the "
        "application",
        "the package my-pkg is not installed",
        "the code is copied, not installed",
        1,
    ),
    (
        f"{RAISED}RuntimeError: DataLoader worker (pid 1817) is killed by signal: Killed. ",
        "a worker of its data loader was killed, as the kernel does when memory runs out",
        "resources.memory",
        1,
    ),
    (f"{RAISED}OSError: [Errno 24] Too many open files: '/data/1.jpg'", "too many open files", "file_system", 1),
    (f"{RAISED}RuntimeError: received 0 items of ancdata", "too many open files", "file_system", 1),
    (
        f"{RAISED}RuntimeError: unable to open shared memory object </torch_9_1> in read-write mode: Too many open "
        "files (24)",
        "too many open files",
        "ulimit -Hn",
        1,
    ),
    (
        f"{RAISED}ImportError: /workspace/code/ops.cpython-311-x86_64-linux-gnu.so: failed to map segment from shared "
        "object",
        "its disk is mounted noexec",
        "TORCH_EXTENSIONS_DIR",
        1,
    ),
    (f"{RAISED}bdb.BdbQuit", "a breakpoint of pdb", "pdb.set_trace", 1),
    (f"{RAISED}EOFError: EOF when reading a line", "it asks for input", "argument", 1),
    ("train.sh: line 2: $'\\r': command not found", "Windows line endings", "sed -i", 127),
    ("/usr/bin/env: \u2018bash\\r\u2019: No such file or directory", "Windows line endings", "sed -i", 127),
    ("bash: ./x.sh: /bin/bash^M: bad interpreter: No such file or directory", "Windows line endings", "sed -i", 126),
]
# What a user's program may raise or print with the same words
USERS = [
    "ValueError: manifest: Driver/library version mismatch",
    "KeyError: 'GPU is lost'",
    "AssertionError: NVML: Unknown Error",
    "RuntimeError: scheduler: system not yet initialized",
    "RuntimeError: the driver version is insufficient",
    "ValueError: uncorrectable ECC error in archive 3",
    "ValueError: no kernel image is available for execution on the device",
    "MyError: CUDA out of memory",
    "ValueError: CUDA error: out of memory",
    "RuntimeError: all CUDA-capable devices are busy or unavailable",
    "AssertionError: No CUDA GPUs are available",
    "RuntimeError: an illegal memory access was found in the trace",
    "RuntimeError: Error while creating shared memory segment",
    "RuntimeError: Call to ibv_reg_mr failed with error Cannot allocate memory",
    "RuntimeError: Mismatched NCCL version",
    "RuntimeError: Duplicate GPU detected in the inventory",
    "RuntimeError: no socket interface",
    "RuntimeError: unhandled system error",
    "ValueError: DataLoader worker (pid 5) is killed by signal: Bus error.",
    "ValueError: unable to write to file </x>: No space left on device (28)",
    "ValueError: No space left on device: '/dev/shm/x'",
    "ValueError: [Errno 28] No space left on device",
    "OSError: no space left on device 3 of the simulated machine",
    "OSError: [Errno 98] Address already in use",
    "OSError: metrics server: port: 29500, address already in use",
    "RuntimeError: port: 29500, address already in use",
    f"{IN_USE}port: 8123, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    "TimeoutError: 20 seconds waiting for clients",
    "RuntimeError: Timed out waiting 20ms for recv of the camera",
    "ValueError: libGL.so.1: cannot open shared object file: No such file or directory",
    "RuntimeError: No module named 'timm'",
    "PermissionError: [Errno 13] Permission denied: '/data'",
    "ValueError: env: ./train.sh: Permission denied",
    "OSError: [Errno 8] Exec format error: './tool'",
    "OSError: [Errno 23] Too many open files in system: '/data/a'",
    "OSError: [Errno 28] inotify watch limit reached",
    "ImportError: libgomp.so.1: failed to map segment from shared object: Cannot allocate memory",
    "ModuleNotFoundError: No module named 'apex'\n\nDuring handling of the above exception, another exception occurred:"
    f"\n\n{RAISED}ValueError: lr must be positive",
    "ValueError: exec format error",
    "ConnectionError: my client: socketStartConnect: Connect to b failed : timed out",
    "ValueError: tool: exec ./a.sh: exec format error",
    "ValueError: unsupported display driver / cuda driver combination",
    "ValueError: convert.py: error: unrecognized arguments: --batch-size 8",
    "ValueError: convert.py: error: unrecognized arguments: --local-rank=1",
    "ValueError: convert.py: error: the following arguments are required: --batch_size",
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "MemoryError",
    "ValueError: No such option: --batch-size",
    "ValueError: ops.so: failed to map segment from shared object",
    "ValueError: Missing option '--batch_size'",
    "ValueError: /data has an InvalidGitRepositoryError",
    "subprocess.CalledProcessError: Command '['git', 'push']' returned non-zero exit status 128.",
    "subprocess.CalledProcessError: Command '['git', 'rev-parse', 'HEAD']' returned non-zero exit status 1.",
    "FileNotFoundError: [Errno 2] No such file or directory: 'git.txt'",
    "ValueError: FileNotFoundError: No such file or directory: 'git'",
    "ValueError: PackageNotFoundError: my_pkg",
    "RuntimeError: DataLoader worker (pid 7) is killed by signal: Aborted. ",
    "ValueError: DataLoader worker (pid 7) is killed by signal: Killed. ",
    "ValueError: received 0 items of ancdata",
    "ValueError: the last command raised bdb.BdbQuit",
    "ValueError: EOFError: EOF when reading a line",
    "EOFError: Ran out of input",
    "ValueError: the file has $'\\r': command not found",
]


@pytest.mark.parametrize(("end", "cause", "fix", "code"), APPLIES)
def test_a_known_cause_has_its_fix_if_there_is_one(end: str, cause: str, fix: str, code: int) -> None:
    found = cause_of_output(end, "", {**KNOWN, "code": str(code)})
    assert found is not None
    assert cause in found.what
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)


@pytest.mark.parametrize("words", USERS)
def test_no_rule_applies_to_the_same_words_of_a_users_program(words: str) -> None:
    for end in (f"{RAISED}{words}", words.partition(": ")[2], f"ERROR train.py: {words.partition(': ')[2]}"):
        assert cause_of_output(end, "", {**KNOWN, "code": "1"}) is None


# Docker's words, with the path that is ours
OF_ENGINE = [
    (
        'invalid mount config for type "bind": bind source path does not exist: /home/ada/.launcher/x-1/workdir/a',
        "its engine has no access to /home/ada/.launcher, the folder of the runs",
        "root_squash",
    ),
    (
        'invalid mount config for type "bind": stat /home/ada/.launcher/x-1: permission denied',
        "its engine has no access to /home/ada/.launcher",
        "root_squash",
    ),
    (
        "error while creating mount source path '/home/ada/.launcher/x-1': mkdir /home/ada: permission denied",
        "its engine has no access to /home/ada/.launcher",
        "a link to a folder of a local disk",
    ),
    (
        'OCI runtime create failed: runc create failed: error mounting "/home/ada/.launcher/x-1" to rootfs at "/o": '
        "stat /home/ada/.launcher/x-1: permission denied: unknown",
        "its engine has no access to /home/ada/.launcher",
        "root_squash",
    ),
    # https://github.com/marcelauliano/MitoHiFi/issues/73
    (
        'failed to register layer: failed to Lchown "/opt/m" for UID 54818, GID 1048853 (try increasing the number of '
        "subordinate IDs in /etc/subuid and /etc/subgid): lchown /opt/m: invalid argument",
        "too few user IDs",
        "/etc/subuid",
    ),
    ("exec /usr/bin/sh: exec format error", "another CPU architecture", "--platform"),
]


@pytest.mark.parametrize(("words", "what", "fix"), OF_ENGINE)
def test_what_an_engine_says_of_the_users_folders_and_of_images(words: str, what: str, fix: str) -> None:
    found = cause_of_report(ENGINE, words)
    assert found is not None
    assert what in found.what
    assert fix in found.fix
    assert cause_of_report(ENGINE, "bind source path does not exist: /data/.launcher-sets") is None


def test_each_rule_has_a_recorded_text_and_words_of_a_user() -> None:
    programs = [end for end, *_ in APPLIES] + [output(error, log) for _, error, log, _, _ in RECORDED]
    asked = ["GPU requires reset", "Failed to initialize NVML: Insufficient Permissions"]
    asked += ['OCI runtime create failed: ... exec: "./train.sh": permission denied: unknown']
    asked += ["was killed by SIGILL (exit code 132)", *(words for words, _, _ in OF_ENGINE)]
    asked += [words for _, words, *_ in TOOLKIT] + [m.failure[0] for m, *_ in FAULTS.values() if m.failure]
    for rule in RULES:
        asks = all(origin in (SMI, ENGINE, SIGNAL) for origin in rule.origins)
        texts = asked if asks else programs
        assert any(re.search(rule.pattern, text, re.MULTILINE) for text in texts), rule.pattern
        assert asks or any(re.search(rule.pattern, words, re.MULTILINE) for words in USERS), rule.pattern


@pytest.mark.parametrize(
    "words",
    [
        "/usr/bin/python: No module named gpustat",
        "fatal: not a git repository (or any of the parent directories): .git",
        "ffmpeg: error while loading shared libraries: libgomp.so.1: cannot open shared object file: No such file",
        "tee: /output/a: No space left on device",
    ],
)
def test_a_line_after_which_the_program_went_on_is_no_cause(words: str) -> None:
    assert cause_of_output(f"{words}\nloss is nan\n", "", KNOWN)
    assert cause_of_output(f"{words}\nepoch 1\nepoch 2\nloss is nan\n", "", KNOWN) is None


def test_a_warning_of_nccl_long_before_the_end_counts_only_if_cpp_ended_the_program() -> None:
    log = "n:1:2 [0] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_cq failed\n" + "epoch\n" * 40
    assert cause_of_output("loss is nan\n", f"{log}loss is nan\n", KNOWN) is None
    ended = "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    assert cause_of_output(ended, f"{log}{ended}", KNOWN)


def test_without_the_runs_port_no_port_is_its_own() -> None:
    end = f"{WHERE}{IN_USE}port: 29500, code: -98, name: EADDRINUSE, message: address already in use"
    assert cause_of_output(end, "", {"node": "n0"}) is None


def test_one_fault_has_one_text_wherever_it_is_seen() -> None:
    texts = (
        cause_of_report(SMI, "Failed to initialize NVML: Driver/library version mismatch"),
        cause_of_report(ENGINE, TOOLKIT[4][1]),
    )
    error = "RM has detected an NVML/RM version mismatch."
    found = cause_of_output(f"{RAISED}pynvml.NVMLError_LibRmVersionMismatch: {error}", "", KNOWN)
    assert {*texts, found} == {found}
    assert isinstance(found, Cause)
    assert "reboot the node" in found.fix


def test_the_end_of_a_killed_process_is_stated_without_a_guess() -> None:
    found = first_failure([evidence(0, "step 3\n", 137)])
    assert found is not None
    assert (found.what, found.cure) == ("was killed by SIGKILL (exit code 137)", "")


@pytest.mark.parametrize(
    ("log", "code"), [("step 3\n", 132), (REPORT.format(1).replace(": 1 (pid: 7)", ": -4 (pid: 7)"), 1)]
)
def test_an_illegal_instruction_is_explained(log: str, code: int) -> None:
    found = first_failure([evidence(0, log, code)])
    assert found is not None
    assert found.what.startswith("was killed by SIGILL")
    assert "the processor lacks an instruction" in found.what
    assert "lscpu" in found.cure


def test_memory_that_infiniband_cannot_lock_is_no_limit_if_there_is_none() -> None:
    """https://github.com/NVIDIA/nccl/issues/1191: too many queues; on a DGX Spark: pages that cannot be moved."""
    log = "n:1:2 [0] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory\n"
    limited, free = (cause_of_output(log, log, {**KNOWN, **more}) for more in ({}, {"memlock": UNLIMITED}))
    assert limited is not None
    assert free is not None
    assert "memlock limit is too low" in limited.what
    assert "LimitMEMLOCK" not in free.fix
    assert "although memlock is unlimited" in free.what


def test_a_repository_of_another_user_is_not_a_missing_one() -> None:
    end = f"{RAISED}subprocess.CalledProcessError: Command '['git', 'log']' returned non-zero exit status 128."
    assert cause_of_output(end, f"fatal: detected dubious ownership in repository at '/opt/x'\n{end}", KNOWN) is None


# As printed by click 8.5, typer 0.29, jsonargparse 4.53, fire 0.7, absl 2.5, argparse of Python 3.14
REFUSALS = [
    (
        "Usage: c.py [OPTIONS]\nTry 'c.py --help' for help.\n\nError: Invalid value for '--lr': 'x' is not a float.\n",
        "Error: Invalid value for '--lr': 'x' is not a float.",
    ),
    (
        "Usage: t.py [OPTIONS]\nTry 't.py --help' for help.\n\u256d\u2500 Error \u2500\u2500\u256e\n\u2502 Got "
        "unexpected  \u2502\n\u2502 extra argument  \u2502\n\u2570\u2500\u2500\u256f\n",
        "Got unexpected extra argument",
    ),
    (
        "usage: j.py [--lr LR]\ntip: For details of accepted options run: j.py --help\n"
        "error: Parser key \"lr\":\n  Expected a <class 'float'>. Got value: x\n",
        "error: Parser key \"lr\": Expected a <class 'float'>. Got value: x",
    ),
    (
        "ERROR: The function received no value for the required argument: lr\nUsage: f.py LR <flags>\n  optional flags:"
        "        --epochs\n\nFor detailed information on this command, run:\n  f.py --help\n",
        "The function received no value for the required argument: lr",
    ),
    (
        "FATAL Flags parsing error: Unknown command line flag 'foo'\n"
        "Pass --helpshort or --helpfull to see help on flags.",
        "Unknown command line flag 'foo'",
    ),
    ("usage: python -m a.main [-h]\npython -m a.main: error: argument --lr: invalid\n", "argument --lr: invalid"),
]


@pytest.mark.parametrize(("end", "named"), REFUSALS)
def test_what_a_parser_of_arguments_says_is_the_error(end: str, named: str) -> None:
    found = first_failure([evidence(0, f"step 3\n{RAISED}KeyError: 'handled'\nstep 4\n{end}", 2), evidence(1, LOST)])
    assert found is not None
    assert found.node == "n0"
    assert found.what.startswith("exited with code 2: ")
    assert found.what.endswith(named)


@pytest.mark.parametrize("end", ["Error: connection reset by peer\n", "error: x\n", "Usage: x\nstep 4\n"])
def test_other_last_lines_are_no_refusal_of_arguments(end: str) -> None:
    assert error_line(f"step 3\n{end}") == ""


UNFINISHED = """  File "/workspace/code/train.py", line 2
    def x(
         ^
SyntaxError: '(' was never closed"""
INDENT = """  File "/workspace/code/train.py", line 2
    print(1)
    ^
IndentationError: expected an indented block after 'if' statement on line 1"""
ENCODING = "SyntaxError: Non-UTF-8 code starting with '\\xff' in file train.py on line 1, but no encoding declared"


@pytest.mark.parametrize("end", [UNFINISHED, INDENT, ENCODING])
def test_a_script_that_python_cannot_compile_is_named(end: str) -> None:
    """It is said without the first line of a traceback."""
    found = first_failure([evidence(0, f"step 3\n{RAISED}KeyError: 'handled'\nstep 4\n{end}\n"), evidence(1, LOST)])
    assert found is not None
    assert (found.node, found.what) == ("n0", f"exited with code 1: {end.splitlines()[-1]}")
    assert found.words == end


def test_a_module_that_python_cannot_compile_has_the_whole_traceback() -> None:
    end = f"{RAISED}{UNFINISHED}"
    found = first_failure([evidence(0, f"step 3\n{end}\n")])
    assert found is not None
    assert found.what.endswith(": SyntaxError: '(' was never closed")
    assert found.words == end


def test_the_last_line_of_a_rank_that_names_no_error_is_told_as_such() -> None:
    """As sys.exit("text") prints it."""
    log = "step 3\nno data in\t/data/pets\n"
    own = evidence(0, log)
    found = first_failure([replace(own, attempts=(Attempt(0.0, failed=((0, 1),)),))])
    assert found is not None
    assert found.what == "exited with code 1; its last line: no data in /data/pets"


@pytest.mark.parametrize("code", [124, 125])
def test_a_programs_own_exit_code_is_no_time_limit_and_no_hang(code: int) -> None:
    found = first_failure([evidence(0, "my deadline passed\n", code)])
    assert found is not None
    assert (found.what, found.cure) == (f"exited with code {code}", "")
