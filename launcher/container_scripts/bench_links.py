"""How fast two nodes are together: latency and bandwidth in each direction; and all nodes in an all-reduce.

Runs in the job's image, from bench_node.py. A pair is a process group of two with a store of its own, so that a lost
node costs only its own pairs. Every operation has a time limit. Python 3.8.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from datetime import timedelta
from typing import Any, Callable, NamedTuple

# NCCL's operations raise at their time limit; else its watchdog ends the process.
os.environ["TORCH_NCCL_BLOCKING_WAIT"] = os.environ["NCCL_BLOCKING_WAIT"] = "1"

import torch
import torch.distributed as dist

Tell = Callable[..., None]
SMALLEST = 16 << 10  # bytes of a message
LARGEST = {"cpu": 32 << 20, "cuda": 256 << 20}
PIECE = 0.1  # share of a direction's time that one message may take


class Place(NamedTuple):
    """Where a process group meets, and who this process is in it."""

    address: str
    port: int
    hosts: bool  # its store is this process's own
    rank: int
    size: int


def store(address: str, port: int, *, hosts: bool, seconds: float) -> Any:
    """Raises RuntimeError when nothing answers in time."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=hosts, timeout=timedelta(seconds=max(seconds, 0.1)), wait_for_workers=False
    )


def joined(place: Place, name: str, backend: str, own: Any, until: float) -> None:
    """Make the process group. own: this process's store, which it uses where it hosts the group."""
    left = max(until - time.monotonic(), 0.1)
    if not place.hosts:  # torch's own attempt at a machine that is gone outlasts its time limit
        try:
            socket.create_connection((place.address, place.port), timeout=left).close()
        except OSError as error:
            raise RuntimeError(f"no connection to {place.address}: {error}") from error
    found = own if place.hosts else store(place.address, place.port, hosts=False, seconds=left)
    # Wait for all first: after a group that failed to begin, torch names the next one otherwise than its peers do.
    found.set(f"{name}-here-{place.rank}", "")
    found.wait([f"{name}-here-{rank}" for rank in range(place.size)], timedelta(seconds=left))
    found.set_timeout(timedelta(seconds=left))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(name, found),  # type: ignore[attr-defined]
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=max(until - time.monotonic(), 0.1)),
    )


def pair(place: Place, name: str, device: str, own: Any, begin: float, length: float, tell: Tell) -> None:
    """One round of a pair, `length` seconds from `begin` on: latency, then the lower rank sends, then the higher one.

    tell: called with what this process has measured. Raises RuntimeError when the other one is lost.
    """
    end = begin + length
    joined(place, name, "nccl" if device == "cuda" else "gloo", own, begin + 0.45 * length)
    try:
        link = _Link(1 - place.rank, device, end)
        if place.rank == 0:
            tell(kind="latency", value=link.ping(begin + 0.5 * length) * 1e6, unit="us")
        else:
            link.answer()
        for sender, until in ((0, begin + 0.68 * length), (1, begin + 0.86 * length)):
            if place.rank != sender:
                link.receive()
                continue
            before = segments()
            value = link.send(until)
            sent, again = (now - then for now, then in zip(segments(), before))
            tell(kind="bandwidth", value=value * 8 / 1e9, unit="Gb/s", again=again / max(sent + again, 1))
    finally:
        dist.destroy_process_group()


class _Link:
    """Messages to the other process of a group of two. A message is announced by its size, and answered."""

    def __init__(self, other: int, device: str, end: float) -> None:
        self._other = other
        self._end = end
        self._word = torch.zeros(1, dtype=torch.int64, device=device)
        self._data = torch.zeros(LARGEST[device], dtype=torch.uint8, device=device)

    def _wait(self, work: Any) -> None:
        work.wait(timedelta(seconds=max(self._end - time.monotonic(), 0.05)))

    def _say(self, number: int) -> None:
        self._word.fill_(number)
        self._wait(dist.isend(self._word, self._other))

    def _hear(self) -> int:
        self._wait(dist.irecv(self._word, self._other))
        return int(self._word.item())

    def ping(self, until: float) -> float:
        """Seconds to the other one, from half the way there and back."""
        found: list[float] = []
        while len(found) < 1000 and (len(found) < 5 or time.monotonic() < until):
            began = time.perf_counter()
            self._say(1)
            self._hear()
            found.append((time.perf_counter() - began) / 2)
        self._say(0)
        return sorted(found)[len(found) // 4]  # processes that share a core wait for each other now and then

    def answer(self) -> None:
        while self._hear():
            self._say(1)

    def send(self, until: float) -> float:
        """Bytes per second."""
        began = time.monotonic()
        size = SMALLEST
        times: list[float] = []
        sizes: list[int] = []
        while len(times) < 2 or time.monotonic() + times[-1] < until:
            start = time.perf_counter()
            self._say(size)
            self._wait(dist.isend(self._data[:size], self._other))
            self._hear()
            times.append(time.perf_counter() - start)
            sizes.append(size)
            wanted = PIECE * (until - began) * size / times[-1]
            size = int(min(max(min(wanted, 8 * size), SMALLEST), len(self._data)))
        self._say(0)
        # Of the large ones the best: moments in which one of the machines did something else say nothing of the link.
        return max(n / t for n, t in zip(sizes[1:], times[1:]) if n * 2 >= max(sizes[1:]))

    def receive(self) -> None:
        while size := self._hear():
            self._wait(dist.irecv(self._data[:size], self._other))
            self._say(1)


def segments() -> tuple[int, int]:
    """TCP segments that this machine has sent for the first time, and again."""
    try:
        with open("/proc/net/snmp") as file:
            names, values = (line.split() for line in file if line.startswith("Tcp:"))
    except (OSError, ValueError):
        return 0, 0
    return int(values[names.index("OutSegs")]), int(values[names.index("RetransSegs")])


def together(place: Place, device: str, own: Any, begin: float, length: float, tell: Tell) -> None:
    """All-reduce over all. Bus bandwidth as nccl-tests count it: bytes / time * 2 (n - 1) / n. Raises RuntimeError."""
    joined(place, "together", "nccl" if device == "cuda" else "gloo", own, begin + 0.5 * length)
    try:
        data = torch.ones((64 if device == "cuda" else 1) << 20, device=device)

        def once() -> float:
            data.fill_(1.0)
            began = time.perf_counter()
            dist.all_reduce(data)
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - began

        once()
        slowest = torch.tensor([once(), begin + length - time.monotonic()], device=device)
        slowest[1] *= -1
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # so that all do it equally often
        times = int(min(max(-0.7 * slowest[1].item() / slowest[0].item(), 1), 100))
        seconds = statistics.median([once() for _ in range(times)])
        value = 4 * len(data) / seconds * 2 * (place.size - 1) / place.size
        if place.rank == 0:
            tell(kind="all-reduce", value=value * 8 / 1e9, unit="Gb/s", size=4 * len(data))
    finally:
        dist.destroy_process_group()
