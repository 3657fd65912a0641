"""Benchmark of the network: latency and bandwidth of pairs in each direction, and an all-reduce over all nodes.

Runs in the job's image, called by bench_node.py. Each pair is a process group of two with its own store, so that a lost
node affects only its own pairs. Every operation has a time limit. Python 3.8.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from datetime import timedelta
from typing import Any, Callable, NamedTuple

# NCCL's operations raise an error at their time limit; otherwise its watchdog would abort the process.
os.environ["TORCH_NCCL_BLOCKING_WAIT"] = os.environ["NCCL_BLOCKING_WAIT"] = "1"

import torch
import torch.distributed as dist

Report = Callable[..., None]
SMALLEST = 16 << 10  # bytes of a message
LARGEST = {"cpu": 32 << 20, "cuda": 256 << 20}
PIECE = 0.1  # share of a direction's time that one message may take


class ProcessGroup(NamedTuple):
    """Address of a process group's store, and this process's rank in the group."""

    address: str
    port: int
    hosts: bool  # this process hosts the store
    rank: int
    size: int


def store(address: str, port: int, *, hosts: bool, seconds: float) -> Any:
    """Open a store. Raises RuntimeError on a timeout."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=hosts, timeout=timedelta(seconds=max(seconds, 0.1)), wait_for_workers=False
    )


def create_group(group: ProcessGroup, name: str, backend: str, own: Any, until: float) -> None:
    """Create the process group. own: this process's store, used if it hosts the group."""
    left = max(until - time.monotonic(), 0.1)
    if not group.hosts:  # torch's own connection attempt to an unreachable machine exceeds its time limit
        try:
            socket.create_connection((group.address, group.port), timeout=left).close()
        except OSError as error:
            raise RuntimeError(f"no connection to {group.address}: {error}") from error
    found = own if group.hosts else store(group.address, group.port, hosts=False, seconds=left)
    # Wait for all ranks first: after a failed initialization, torch would name the next group differently on its peers.
    found.set(f"{name}-here-{group.rank}", "")
    found.wait([f"{name}-here-{rank}" for rank in range(group.size)], timedelta(seconds=left))
    found.set_timeout(timedelta(seconds=left))
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(name, found),  # type: ignore[attr-defined]
        rank=group.rank,
        world_size=group.size,
        timeout=timedelta(seconds=max(until - time.monotonic(), 0.1)),
    )


def pair(group: ProcessGroup, name: str, device: str, own: Any, start: float, length: float, report: Report) -> None:
    """Measure a pair for `length` seconds from `start`: latency, then the lower rank sends, then the higher one.

    report: called with each measurement of this process. Raises RuntimeError if the other process is lost.
    """
    end = start + length
    create_group(group, name, "nccl" if device == "cuda" else "gloo", own, start + 0.45 * length)
    try:
        link = _Link(1 - group.rank, device, end)
        if group.rank == 0:
            report(kind="latency", value=link.ping(start + 0.5 * length) * 1e6, unit="us")
        else:
            link.answer()
        for sender, until in ((0, start + 0.68 * length), (1, start + 0.86 * length)):
            if group.rank != sender:
                link.receive()
                continue
            before = segments()
            value = link.send(until)
            sent, again = (now - then for now, then in zip(segments(), before))
            report(kind="bandwidth", value=value * 8 / 1e9, unit="Gb/s", again=again / max(sent + again, 1))
    finally:
        dist.destroy_process_group()


class _Link:
    """Messages to the other process of a pair. The size of each message is sent first, and each is acknowledged."""

    def __init__(self, other: int, device: str, end: float) -> None:
        self._other = other
        self._end = end
        self._header = torch.zeros(1, dtype=torch.int64, device=device)
        self._data = torch.zeros(LARGEST[device], dtype=torch.uint8, device=device)

    def _wait(self, work: Any) -> None:
        work.wait(timedelta(seconds=max(self._end - time.monotonic(), 0.05)))

    def _send_header(self, number: int) -> None:
        self._header.fill_(number)
        self._wait(dist.isend(self._header, self._other))

    def _receive_header(self) -> int:
        self._wait(dist.irecv(self._header, self._other))
        return int(self._header.item())

    def ping(self, until: float) -> float:
        """Return the latency in seconds: half the round-trip time."""
        found: list[float] = []
        while len(found) < 1000 and (len(found) < 5 or time.monotonic() < until):
            began = time.perf_counter()
            self._send_header(1)
            self._receive_header()
            found.append((time.perf_counter() - began) / 2)
        self._send_header(0)
        return sorted(found)[
            len(found) // 4
        ]  # lower quartile: processes that share a core sometimes wait for each other

    def answer(self) -> None:
        while self._receive_header():
            self._send_header(1)

    def send(self, until: float) -> float:
        """Return the bandwidth in bytes per second."""
        began = time.monotonic()
        size = SMALLEST
        times: list[float] = []
        sizes: list[int] = []
        while len(times) < 2 or time.monotonic() + times[-1] < until:
            start = time.perf_counter()
            self._send_header(size)
            self._wait(dist.isend(self._data[:size], self._other))
            self._receive_header()
            times.append(time.perf_counter() - start)
            sizes.append(size)
            wanted = PIECE * (until - began) * size / times[-1]
            size = int(min(max(min(wanted, 8 * size), SMALLEST), len(self._data)))
        self._send_header(0)
        # The best of the large messages: slower ones may be caused by other activity on one of the machines.
        return max(n / t for n, t in zip(sizes[1:], times[1:]) if n * 2 >= max(sizes[1:]))

    def receive(self) -> None:
        while size := self._receive_header():
            self._wait(dist.irecv(self._data[:size], self._other))
            self._send_header(1)


def segments() -> tuple[int, int]:
    """Return the numbers of TCP segments that this machine has sent and retransmitted."""
    try:
        with open("/proc/net/snmp") as file:
            names, values = (line.split() for line in file if line.startswith("Tcp:"))
    except (OSError, ValueError):
        return 0, 0
    return int(values[names.index("OutSegs")]), int(values[names.index("RetransSegs")])


def together(group: ProcessGroup, device: str, own: Any, start: float, length: float, report: Report) -> None:
    """Measure an all-reduce over all nodes. Bus bandwidth as in nccl-tests: bytes / time * 2 (n - 1) / n.

    Raises RuntimeError.
    """
    create_group(group, "together", "nccl" if device == "cuda" else "gloo", own, start + 0.5 * length)
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
        slowest = torch.tensor([once(), start + length - time.monotonic()], device=device)
        slowest[1] *= -1
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)  # so that all ranks use the same number of repetitions
        times = int(min(max(-0.7 * slowest[1].item() / slowest[0].item(), 1), 100))
        seconds = statistics.median([once() for _ in range(times)])
        value = 4 * len(data) / seconds * 2 * (group.size - 1) / group.size
        if group.rank == 0:
            report(kind="all-reduce", value=value * 8 / 1e9, unit="Gb/s", size=4 * len(data))
    finally:
        dist.destroy_process_group()
