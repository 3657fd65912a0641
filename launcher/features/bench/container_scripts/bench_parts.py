"""Benchmark of one machine: its GPUs or its processor, and the storage that holds its data.

Runs in the job's image, called by bench_node.py. Units: GB/s (10^9 bytes), TFLOP/s and GFLOP/s. Python 3.8.
"""

from __future__ import annotations

import heapq
import mmap
import os
import stat
import statistics
import sys
import threading
import time
from typing import Any, Callable, Iterator

import torch

Report = Callable[..., None]
WINDOW = 0.1  # seconds of work between two readings of the clock
MOST_FILES = 256
LEAST_BYTES = 1 << 20  # a read of less data is meaningless
HUNG = 5.0  # seconds after which a copy between two GPUs hangs: the slowest PCIe link needs one
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": torch.float32}


def rates(work: Callable[[], Any], settle: Callable[[], Any], amount: float, until: float) -> list[float]:
    """Return amounts per second for consecutive windows until time.monotonic() reaches `until`.

    work: processes `amount` once, possibly asynchronously; settle: waits for its completion.
    """
    work()
    settle()
    began = time.monotonic()
    work()
    settle()
    times = max(1, int(WINDOW / max(time.monotonic() - began, 1e-6)))
    found: list[float] = []
    while not found or time.monotonic() < until:
        began = time.monotonic()
        for _ in range(times):
            work()
        settle()
        found.append(times * amount / (time.monotonic() - began))
    return found


def processor(seconds: float, report: Report) -> None:
    """Measure matrix products on all threads, then copies between two memory buffers larger than any cache.

    The harmonic mean of the windows is total work by total time: under a quota (docker run --cpus) a window gets all of
    the processor or almost nothing, so that their median depends on chance.
    """
    begin = time.monotonic()
    of = f"{torch.get_num_threads()} threads"
    size = 768
    one, two, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    found = rates(lambda: torch.mm(one, two, out=out), lambda: None, 2 * size**3, begin + 0.5 * seconds)
    report(kind="matmul", part="processor", of=of, value=statistics.harmonic_mean(found) / 1e9, unit="GFLOP/s")
    source, target = torch.ones(16 << 20), torch.empty(16 << 20)
    found = rates(lambda: target.copy_(source), lambda: None, 2 * 4 * (16 << 20), begin + seconds)
    report(kind="memory", part="processor", of=of, value=statistics.harmonic_mean(found) / 1e9, unit="GB/s")


class HungError(Exception):
    """A GPU does not finish its work. Whatever is asked of it next would wait forever."""


def gpus(seconds: float, precision: str, report: Report) -> bool:
    """Measure matrix products on all GPUs simultaneously, as in training, then copies on one GPU after the other.

    Return whether they can be used on: not if one hangs.
    """
    begin, count = time.monotonic(), torch.cuda.device_count()
    until = begin + 0.5 * seconds
    threads = [threading.Thread(target=_guarded, args=(_matmul, i, until, precision, report)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(count):
        left = begin + seconds - time.monotonic()
        try:
            _guarded(_copies, index, max(left / (count - index), 0.2), report)
        except HungError as error:
            report(kind="failed", **_gpu(index), what=str(error))
            return False
    return True


def _guarded(measure: Callable[..., None], index: int, *arguments: Any) -> None:
    try:
        measure(index, *arguments)
    except RuntimeError as error:  # a CUDA error; the other GPUs are measured anyway
        arguments[-1](kind="failed", **_gpu(index), what=f"{str(error).splitlines()[0][:200]}")


def _gpu(index: int) -> dict[str, Any]:
    seen = torch.cuda.get_device_properties(index)
    return {"part": f"GPU {index}", "of": seen.name, "uuid": str(getattr(seen, "uuid", ""))}


def computed_in(wanted: str, capability: tuple[int, int]) -> str:
    """Return the precision for a compute capability: before 8.0, bf16 is emulated and the trainer uses fp16."""
    return "fp16" if wanted == "bf16" and capability < (8, 0) else wanted


def _matmul(index: int, until: float, wanted: str, report: Report) -> None:
    precision = computed_in(wanted, torch.cuda.get_device_capability(index))
    dtype = _PRECISIONS.get(precision, torch.bfloat16)
    size = 8192
    one = torch.randn(size, size, device=f"cuda:{index}").to(dtype)
    two, out = torch.randn_like(one), torch.empty_like(one)
    found = rates(lambda: torch.mm(one, two, out=out), lambda: torch.cuda.synchronize(index), 2 * size**3, until)
    sustained = found[len(found) // 2 :]  # a hot GPU slows down
    value = statistics.median(sustained) / 1e12
    report(kind="matmul", **_gpu(index), value=value, unit="TFLOP/s", precision=precision)


def _copies(index: int, seconds: float, report: Report) -> None:
    """Measure copies on the device, from and to pinned host memory, and to the next GPU of this machine."""
    size = min(256 << 20, torch.cuda.get_device_properties(index).total_memory // 16)
    here = torch.ones(size, dtype=torch.uint8, device=torch.device("cuda", index))
    host, there = torch.ones(size, dtype=torch.uint8).pin_memory(), torch.empty_like(here)
    ways = [("copy", 2, there, here), ("to GPU", 1, here, host), ("from GPU", 1, host, here)]
    other = (index + 1) % torch.cuda.device_count()
    if other != index:
        ways.append(("peer", 1, torch.empty_like(here, device=torch.device("cuda", other)), here))
    for kind, times, target, source in ways:

        def copy(target: Any = target, source: Any = source) -> None:
            target.copy_(source, non_blocking=True)

        def settle(hangs: bool = kind == "peer") -> None:
            finish(index, f"copies to GPU {other} hang") if hangs else torch.cuda.synchronize(index)

        found = rates(copy, settle, times * size, time.monotonic() + seconds / len(ways))
        report(kind=kind, **_gpu(index), value=statistics.median(found) / 1e9, unit="GB/s")


def finish(index: int, problem: str) -> None:
    """Wait for the GPU's work. Raises HungError with the problem, where torch.cuda.synchronize would wait forever."""
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    until = time.monotonic() + HUNG
    done.record(torch.cuda.current_stream(index))
    while not done.query():
        if time.monotonic() > until:
            raise HungError(problem)
        time.sleep(0.0002)


def read(path: str, seconds: float, report: Report) -> None:
    """Measure complete reads of the largest files of a folder, bypassing the page cache."""
    until = time.monotonic() + seconds
    files = _largest(path, 0.2 * seconds)
    if sum(size for size, _ in files) < LEAST_BYTES:
        report(kind="note", part=path, what=f"{path} contains less than {LEAST_BYTES >> 20} MiB to read")
        return
    buffer = mmap.mmap(-1, 1 << 20)  # aligned, as O_DIRECT requires
    found, amount, began = [], 0, time.monotonic()
    try:
        while time.monotonic() < until:
            before = amount
            for _, file in files:
                for count in _uncached(file, buffer):
                    amount += count
                    now = time.monotonic()
                    if now - began >= 2 * WINDOW:
                        found.append((amount - before) / (now - began))
                        before, began = amount, now
                    if now >= until:
                        break
                if time.monotonic() >= until:
                    break
            if amount == 0:
                break
    except OSError as error:
        report(kind="failed", part=path, what=f"could not be read: {error}")
        return
    if found:
        report(kind="read", part=path, of=path, value=statistics.median(found) / 1e9, unit="GB/s")
    else:
        report(kind="note", part=path, what=f"{path}: too little data was read in {seconds:.1f} s")


def _largest(path: str, seconds: float) -> list[tuple[int, str]]:
    """Return sizes and paths of the largest files found within the time limit."""
    if os.path.isfile(path):
        return [(os.path.getsize(path), path)]
    until, found = time.monotonic() + seconds, []
    for folder, _, names in os.walk(path):
        for name in names:
            file = os.path.join(folder, name)
            try:
                seen = os.lstat(file)
            except OSError:
                continue
            if stat.S_ISREG(seen.st_mode) and os.access(file, os.R_OK):
                found.append((seen.st_size, file))
        if time.monotonic() > until:
            break
    return heapq.nlargest(MOST_FILES, found)


def _uncached(file: str, buffer: mmap.mmap) -> Iterator[int]:
    """Yield the size of each block read. Without O_DIRECT, the file is first dropped from the page cache."""
    if sys.platform != "linux":
        raise NotImplementedError("nodes run Linux")
    for flag in (os.O_DIRECT, 0):
        try:
            handle = os.open(file, os.O_RDONLY | flag)
        except OSError:
            if flag:
                continue
            raise
        try:
            if not flag:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            count = os.readv(handle, [buffer])
            while count:
                yield count
                count = os.readv(handle, [buffer]) if count == len(buffer) else 0
        except OSError:
            if not flag:
                raise
        else:
            return
        finally:
            os.close(handle)
