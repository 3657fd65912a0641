"""Unauthenticated connections to the port of a min_nodes run use few resources and never block the node."""

from __future__ import annotations

import re
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import Cli
from tests.e2e.drill import Drill
from tests.e2e.test_elastic import processes_of
from tests.e2e.test_process_runtime import process_job
from tests.ports import free_port

pytestmark = pytest.mark.timeout(300)

PORT = free_port()
FLOOD = 250  # connections
PIECE = bytes((1 << 20) - 1)  # each connection sends as much of it as is accepted


@pytest.fixture
def up(home_cli: Cli) -> Iterator[Drill]:
    """A run of two nodes of three that can go on without the third."""
    command = [sys.executable, home_cli.program("chain.py"), "200", "5", "0.1"]
    keys: dict[str, Any] = {"nodes": ["local"] * 3, "min_nodes": 2, "lost_after": "10s", "port": PORT}
    up = Drill.follow(home_cli, "up", home_cli.job("port", **process_job(run={"command": command}, **keys)))
    up.sees("^generation 1 step 5 ")
    yield up
    home_cli("down", code=None)


def agent(cli: Cli) -> int:
    """Return the PID of the first node's agent."""
    [pid] = processes_of(cli, "local-0", r"^\S*python\S* \S*/kit/elastic\.py ")
    return pid


def own(pid: int, key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


@contextmanager
def strangers(count: int, send: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open connections and keep them open. Data that is not accepted immediately is not sent."""
    with ExitStack() as links:
        opened = []
        for _ in range(count):
            with suppress(OSError):  # its queue is full
                link = links.enter_context(socket.create_connection(("127.0.0.1", PORT), 1))
                link.settimeout(0.3)
                with suppress(OSError):
                    link.sendall(send)
                opened.append(link)
        yield opened


def closes_forged_connection() -> None:
    """Check that a node still responds: it closes a connection with a forged message."""
    with socket.create_connection(("127.0.0.1", PORT), 5) as link:
        link.sendall(b"0 {}\n")
        assert link.recv(1) == b""


@pytest.mark.ci
def test_a_flood_of_connections_takes_neither_memory_nor_threads(home_cli: Cli, up: Drill) -> None:
    pid = agent(home_cli)
    memory, threads = own(pid, "VmRSS"), own(pid, "Threads")
    with strangers(FLOOD, PIECE) as opened:
        assert len(opened) > FLOOD // 2
        assert own(pid, "Threads") < threads + FLOOD // 2
        assert own(pid, "VmRSS") - memory < 40 << 10  # KiB
    closes_forged_connection()
    up.end(0)
    assert sum("rank 0 is now on" in line for _, line in up.lines) == 1, str(up)


@pytest.mark.ci
def test_a_node_that_cannot_start_threads_recovers_when_it_can(home_cli: Cli, up: Drill) -> None:
    pid = agent(home_cli)
    room = (own(pid, "VmSize") << 10) + (40 << 20)  # enough for a few stacks of 8 MiB
    before = resource.prlimit(pid, resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    with strangers(30):
        resource.prlimit(pid, resource.RLIMIT_AS, before)
    closes_forged_connection()
    up.end(0)
    assert sum("rank 0 is now on" in line for _, line in up.lines) == 1, str(up)
