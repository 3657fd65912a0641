"""An interrupted push of data continues at the next call: little data is sent twice, and all of it is correct.

Data sent twice is the content of sockets and queues at that moment, independent of the total size. The nodes get the
default socket buffers of Linux; the machine of the bed may have larger ones.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import pytest

from bench.data import shaped
from tests.bed import faults
from tests.bed.bed import Bed, Node
from tests.e2e.scene import Scene

pytestmark = [pytest.mark.bed, pytest.mark.slow, pytest.mark.timeout(1500)]
MIB = 1 << 20
SIZE = 256 * MIB
RATE = "200mbit"  # of every link: slower than two cores, so that sockets hold little data
MOMENTS = 10
TWICE = 10 * MIB  # limit for each receiver: 2 % of 512 MiB
BUFFERS = "net.ipv4.tcp_rmem='4096 131072 6291456' net.ipv4.tcp_wmem='4096 16384 4194304'"
SOURCE = "~/pets"
NODES = ("--nodes", "node1,node2,node3")  # node1 is the source, node2 forwards to node3
PUSH = ("data", "push", f"node1:{SOURCE}", *NODES, "--image", "launcher-bed-train", "--json")


Fault = Callable[[Bed, "subprocess.Popen[str]"], AbstractContextManager[None]]


@contextmanager
def launcher_killed(bed: Bed, process: subprocess.Popen[str]) -> Iterator[None]:
    process.kill()
    yield


@contextmanager
def relay_killed(bed: Bed, process: subprocess.Popen[str]) -> Iterator[None]:
    node = bed.nodes[1]
    for container in bed.docker(node, "ps", "-q", "--filter", "label=launcher.purpose=data").split():
        bed.docker(node, "kill", container)
    yield


@contextmanager
def engine_killed(bed: Bed, process: subprocess.Popen[str]) -> Iterator[None]:
    with faults.without_engine(bed, bed.nodes[2]):
        yield


@contextmanager
def source_rebooted(bed: Bed, process: subprocess.Popen[str]) -> Iterator[None]:
    with faults.powered_off(bed, bed.nodes[0]):
        yield


@pytest.mark.parametrize("scene", [3], indirect=True)
@pytest.mark.parametrize("fault", [launcher_killed, relay_killed, engine_killed, source_rebooted])
def test_an_interrupted_push_continues(fault: Fault, scene: Scene) -> None:
    cli, bed, receivers = scene.cli, scene.bed, scene.nodes[1:]
    chance = random.Random(fault.__name__)
    make = f"mkdir -p {SOURCE} && head -c {SIZE} /dev/urandom >{SOURCE}/images.tar && echo cat >{SOURCE}/labels.txt"
    bed.sh(scene.nodes[0], make, user="trainer")
    name = json.loads(cli(*PUSH).stdout)["content"][:12]  # the source caches its hashes from now on
    cli("data", "rm", name, "--nodes", "node2,node3")
    with links(bed, scene.nodes):
        before = received_bytes(bed, receivers)
        cli(*PUSH)
        undisturbed = [after - start for after, start in zip(received_bytes(bed, receivers), before, strict=True)]
    cli("data", "rm", name, "--nodes", "node2,node3")
    for _ in range(MOMENTS):
        moment = chance.uniform(0.05, 0.9)
        with links(bed, scene.nodes):
            before = received_bytes(bed, receivers)
            process = cli.start(*PUSH)
            wait_received(bed, receivers[1], before[1] + int(moment * SIZE), process)
            with fault(bed, process):
                printed = process.communicate(timeout=120)
            again = json.loads(cli(*PUSH).stdout)
            received = [after - start for after, start in zip(received_bytes(bed, receivers), before, strict=True)]
        assert set(again["paths"]) == {"node1", "node2", "node3"}, printed
        twice = [got - whole for got, whole in zip(received, undisturbed, strict=True)]
        print(f"at {moment:.2f} of it: {twice} bytes more")
        assert max(twice) <= TWICE, f"at {moment:.2f} of it: {twice} bytes more\n{printed}"
        assert cli("data", "verify", name, "--nodes", "node2,node3").stdout.count("is whole") == 2
        cli("data", "rm", name, "--nodes", "node2,node3")
    bed.sh(scene.nodes[0], f"rm -r {SOURCE}", user="trainer")


@contextmanager
def links(bed: Bed, nodes: Sequence[Node]) -> Iterator[None]:
    """Set both again: a reboot resets them."""
    for node in nodes:
        bed.sh(node, f"sysctl -q -w {BUFFERS}")
    with shaped(bed, nodes, RATE):
        yield


def received_bytes(bed: Bed, nodes: Sequence[Node]) -> list[int]:
    """Return the bytes that each node has received since boot."""
    return [int(bed.sh(node, "cat /sys/class/net/eth0/statistics/rx_bytes")) for node in nodes]


def wait_received(bed: Bed, node: Node, total: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while received_bytes(bed, [node])[0] < total:
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
