"""The machine in some lines: what the figures of bench/gpu.py depend on."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import shutil
import subprocess
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torchvision

from bench.gpu_scale import Figures, Scale
from train.data import roi
from train.data.decode import choose_decoder

PAGE = os.sysconf("SC_PAGE_SIZE")
ASKED = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu"


def machine(scale: Scale) -> Figures:
    """What is installed, what the GPU and the cores reach, and which decoder runs."""
    device = scale.world().device
    found = torch.cuda.get_device_properties(device)
    load, clocks = matrices(scale, device)
    cores = len(os.sched_getaffinity(0))
    return {
        "ok": None,
        "GPU": f"{found.name}, {found.total_memory / 2**30:.0f} GiB, {torch.cuda.get_device_capability(device)}",
        "clocks": clocks,
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, cudnn {torch.backends.cudnn.version()}, "
        f"nccl {torch.cuda.nccl.version()}, torchvision {torchvision.__version__}, python {platform.python_version()}",
        "cores": f"{cores} of {os.cpu_count()}, cpu.max {cpu_max()}, {platform.release()}",
        "compute": load,
        "copies": copies(scale, device),
        "crc32": ", ".join(f"{n} threads {checksums(n, scale.pick(0.5, 0.05)):.2f} GB/s" for n in (1, cores)),
        "page fault": ", ".join(f"{n} threads {faults(n):.2f} µs" for n in (1, cores)),
        "futex": f"a handover between two threads takes {handover():.1f} µs",
        "decoder": decoders(),
    }


def nvidia_smi() -> str:
    if not shutil.which("nvidia-smi"):
        return "no nvidia-smi"
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader", "-i", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return (done.stdout or done.stderr).strip()


def cpu_max() -> str:
    """Return the limit of this control group, as far as this process sees it."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            file = Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "cpu.max"
            return file.read_text().strip() if file.exists() else "none"
    return "unknown"


def seconds(what: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the time of one call of work that is queued on the device."""
    what()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(times):
        what()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / times


def matrices(scale: Scale, device: torch.device) -> tuple[str, str]:
    """Return the rate of a matrix product on random data, and the driver, clocks and power before and in it."""
    side, idle = scale.pick(8192, 64), nvidia_smi()
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    took, busy = seconds(lambda: a @ b, scale.pick(50, 2), device), list[str]()
    asking = threading.Thread(target=lambda: busy.append(nvidia_smi()))
    asking.start()
    while asking.is_alive():
        seconds(lambda: a @ b, 5, device)
    asking.join()
    clocks = f"{ASKED}: {idle}; busy: {''.join(busy)}"
    return f"{2 * side**3 / took / 1e12:.0f} TFLOP/s, {side}x{side} in bf16", clocks


def copies(scale: Scale, device: torch.device) -> str:
    size = scale.pick(2 << 30, 1 << 16)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    inside = 2 * size / seconds(lambda: target.copy_(source), 10, device)
    host, part = torch.ones(size // 4, dtype=torch.uint8, pin_memory=True), target[: size // 4]
    there = len(host) / seconds(lambda: part.copy_(host, non_blocking=True), 5, device)
    back = len(host) / seconds(lambda: host.copy_(part, non_blocking=True), 5, device)
    return (
        f"{inside / 1e12:.2f} TB/s read and written, {there / 1e9:.1f} GB/s from pinned memory, {back / 1e9:.1f} to it"
    )


def at_once(what: Callable[[], float], threads: int) -> list[float]:
    """Return the results of concurrent calls that begin together."""
    gate = threading.Barrier(threads)

    def one(_: int) -> float:
        gate.wait()
        return what()

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(one, range(threads)))


def checksums(threads: int, length: float) -> float:
    """Return GB/s of crc32 on several threads: what the cores can do without the GIL, memory or the kernel."""
    data = bytes(1 << 16)

    def one() -> float:
        count, begin = 0, time.perf_counter()
        while (took := time.perf_counter() - begin) < length:
            for _ in range(16):
                zlib.crc32(data)
            count += 16
        return count * len(data) / took

    return sum(at_once(one, threads)) / 1e9


def faults(threads: int) -> float:
    """Return the µs of a page fault, with so many threads that have them at once."""
    pages = 8192

    def one() -> float:
        memory = mmap.mmap(-1, pages * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        begin = time.perf_counter()
        ctypes.memset(start, 1, pages * PAGE)  # without the GIL
        return (time.perf_counter() - begin) / pages * 1e6

    found = at_once(one, threads)
    return sum(found) / len(found)


def handover(times: int = 5000) -> float:
    """Return the µs until a waiting thread goes on."""
    ping, pong = threading.Semaphore(0), threading.Semaphore(0)

    def answer() -> None:
        for _ in range(times):
            ping.acquire()
            pong.release()

    other = threading.Thread(target=answer)
    other.start()
    begin = time.perf_counter()
    for _ in range(times):
        ping.release()
        pong.acquire()
    took = time.perf_counter() - begin
    other.join()
    return took / times / 2 * 1e6


def decoders() -> str:
    """Return the decoder that `auto` chooses, and whether the compiled one can be built."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    lines = [f"auto is {choose_decoder('auto').name}", f"compiler: {compiler}"]
    if compiler:
        source = "#include <stdio.h>\n#include <jpeglib.h>\n"
        done = subprocess.run([compiler, "-E", "-"], input=source, capture_output=True, text=True, check=False)
        lines.append(f"jpeglib.h: {'there' if done.returncode == 0 else 'missing'}")
    try:
        lines.append(f"compiled decoder: {roi.load().path}")
    except roi.BuildError as error:
        lines.append(f"compiled decoder: {error}")
    return "; ".join(lines)
