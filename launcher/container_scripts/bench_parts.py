"""How fast the parts of one machine are: its GPUs, or its processor, and what it reads its data from.

Runs in the job's image, from bench_node.py. Rates are told as GB/s (10^9 bytes) and TFLOP/s or GFLOP/s. Python 3.8.
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

Tell = Callable[..., None]
WINDOW = 0.1  # seconds of work between two looks at the clock
MOST_FILES = 256
LEAST_BYTES = 1 << 20  # below it, a read says nothing
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": torch.float32}


def rates(work: Callable[[], Any], settle: Callable[[], Any], amount: float, until: float) -> list[float]:
    """Amounts per second, window after window, until that time.monotonic(). work: does `amount` once, and may return
    before it is done; settle: waits for that."""
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


def processor(seconds: float, tell: Tell) -> None:
    """Products of matrices on all of its threads, then copies between two places in memory that no cache holds.

    The harmonic mean of the windows, which is all work by all time: under a quota (docker run --cpus) a window has all
    of the processor or next to none of it, and their median is a matter of chance.
    """
    begin = time.monotonic()
    of = f"{torch.get_num_threads()} threads"
    size = 768
    one, two, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    found = rates(lambda: torch.mm(one, two, out=out), lambda: None, 2 * size**3, begin + 0.5 * seconds)
    tell(kind="matmul", part="processor", of=of, value=statistics.harmonic_mean(found) / 1e9, unit="GFLOP/s")
    source, target = torch.ones(16 << 20), torch.empty(16 << 20)
    found = rates(lambda: target.copy_(source), lambda: None, 2 * 4 * (16 << 20), begin + seconds)
    tell(kind="memory", part="processor", of=of, value=statistics.harmonic_mean(found) / 1e9, unit="GB/s")


def gpus(seconds: float, precision: str, tell: Tell) -> None:
    """Every GPU: products of matrices on all at once, as in a training, then copies on one after the other."""
    begin, count = time.monotonic(), torch.cuda.device_count()
    until = begin + 0.5 * seconds
    threads = [threading.Thread(target=_guarded, args=(_matmul, i, until, precision, tell)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(count):
        left = begin + seconds - time.monotonic()
        _guarded(_copies, index, max(left / (count - index), 0.2), tell)


def _guarded(measure: Callable[..., None], index: int, *arguments: Any) -> None:
    try:
        measure(index, *arguments)
    except RuntimeError as error:  # what CUDA reports; the other GPUs are measured all the same
        arguments[-1](kind="failed", **_gpu(index), what=f"{str(error).splitlines()[0][:200]}")


def _gpu(index: int) -> dict[str, Any]:
    seen = torch.cuda.get_device_properties(index)
    return {"part": f"GPU {index}", "of": seen.name, "uuid": str(getattr(seen, "uuid", ""))}


def computed_in(wanted: str, capability: tuple[int, int]) -> str:
    """The precision on a GPU of that compute capability: before 8.0 bf16 is emulated, and the trainer takes fp16."""
    return "fp16" if wanted == "bf16" and capability < (8, 0) else wanted


def _matmul(index: int, until: float, wanted: str, tell: Tell) -> None:
    precision = computed_in(wanted, torch.cuda.get_device_capability(index))
    dtype = _PRECISIONS.get(precision, torch.bfloat16)
    size = 8192
    one = torch.randn(size, size, device=f"cuda:{index}").to(dtype)
    two, out = torch.randn_like(one), torch.empty_like(one)
    found = rates(lambda: torch.mm(one, two, out=out), lambda: torch.cuda.synchronize(index), 2 * size**3, until)
    sustained = found[len(found) // 2 :]  # a GPU that gets hot becomes slower
    value = statistics.median(sustained) / 1e12
    tell(kind="matmul", **_gpu(index), value=value, unit="TFLOP/s", precision=precision)


def _copies(index: int, seconds: float, tell: Tell) -> None:
    """On the device, from pinned memory of the host and back, and to the next GPU of this machine."""
    size = min(256 << 20, torch.cuda.get_device_properties(index).total_memory // 16)
    here = torch.ones(size, dtype=torch.uint8, device=f"cuda:{index}")
    host, there = torch.ones(size, dtype=torch.uint8).pin_memory(), torch.empty_like(here)
    ways = [("copy", 2, there, here), ("to GPU", 1, here, host), ("from GPU", 1, host, here)]
    if torch.cuda.device_count() > 1:
        neighbour = torch.empty_like(here, device=f"cuda:{(index + 1) % torch.cuda.device_count()}")
        ways.append(("peer", 1, neighbour, here))
    for kind, times, target, source in ways:
        until = time.monotonic() + seconds / len(ways)
        found = rates(
            lambda to=target, of=source: to.copy_(of, non_blocking=True),  # type: ignore[misc]
            lambda: torch.cuda.synchronize(index),
            times * size,
            until,
        )
        tell(kind=kind, **_gpu(index), value=statistics.median(found) / 1e9, unit="GB/s")


def read(path: str, seconds: float, tell: Tell) -> None:
    """The largest files of a folder, each from its begin to its end, past the page cache."""
    until = time.monotonic() + seconds
    files = _largest(path, 0.2 * seconds)
    if sum(size for size, _ in files) < LEAST_BYTES:
        tell(kind="note", part=path, what=f"{path} has no {LEAST_BYTES >> 20} MiB to read")
        return
    buffer = mmap.mmap(-1, 1 << 20)  # aligned, as O_DIRECT demands
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
        tell(kind="failed", part=path, what=f"could not be read: {error}")
        return
    if found:
        tell(kind="read", part=path, of=path, value=statistics.median(found) / 1e9, unit="GB/s")
    else:
        tell(kind="note", part=path, what=f"{path}: too little was read in {seconds:.1f} s")


def _largest(path: str, seconds: float) -> list[tuple[int, str]]:
    """Sizes and paths, as far as they are found in that time."""
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
    """The bytes of each piece. Where the file system lacks O_DIRECT, the file is first dropped from the page cache."""
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
