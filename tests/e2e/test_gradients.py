"""How the gradients travel, as `up`, `status` and the record say it: gloo on each interface of the bed, and the log of
a real run with NCCL, which a program writes as NCCL would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.bed import faults
from tests.bed.bed import Bed
from tests.e2e.cli import Cli, bed_job
from tests.nccl_rows import ROWS

pytestmark = [pytest.mark.bed, pytest.mark.timeout(300)]

# Prints the addresses of its node from which it is connected to the other one, without those of torch's store.
GLOO = """
import os, pathlib, socket, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1000))
addresses, store = sys.argv[1:], os.environ["MASTER_PORT"]
own = set()
for line in open("/proc/net/tcp").read().splitlines()[1:]:
    ends = [(socket.inet_ntoa(bytes.fromhex(end[:8])[::-1]), str(int(end[9:], 16))) for end in line.split()[1:3]]
    (local, _), (remote, _) = ends
    if line.split()[3] == "01" and store not in {port for _, port in ends} and local != remote:
        own |= {local} if {local, remote} <= {*addresses} else set()
print("connected from", *sorted(own), flush=True)
noted = pathlib.Path(os.environ["LAUNCHER_OUTPUT"], "state", os.environ["LAUNCHER_NODE"] + ".groups")
while "group" not in noted.read_text():
    time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
"""
SECOND = ("10.99.0.1", "10.99.0.2")


@pytest.fixture
def second_interface(clean_bed: Bed) -> Iterator[Bed]:
    """The bed's nodes with another interface each, in a network of their own."""
    for node, address in zip(clean_bed.nodes, SECOND, strict=False):
        add = "ip link add link eth0 name second type macvlan mode bridge"
        clean_bed.sh(node, f"{add} && ip addr add {address}/24 dev second && ip link set second up")
    yield clean_bed
    for node, _ in zip(clean_bed.nodes, SECOND, strict=False):
        clean_bed.sh(node, "ip link delete second")


def test_gloo_uses_the_interface_that_is_named(bed_cli: Cli, second_interface: Bed) -> None:
    (bed_cli.cwd / "reduce.py").write_text(GLOO)
    first = [node.address for node in second_interface.nodes[:2]]
    for interface, addresses in (("eth0", first), ("second", SECOND)):
        nodes = [{"host": f"node{index}", "address": address} for index, address in enumerate(addresses, 1)]
        run = {"script": "reduce.py", "args": [*first, *SECOND]}
        done = bed_cli("up", bed_cli.job(**bed_job(nodes=nodes, run=run, gpus="none")))
        said = f"gradients: TCP (gloo) on {interface} ({', '.join(addresses)})"
        assert said in done.stderr
        assert f"connected from {addresses[0]}\n" in done.stdout
        assert bed_cli.result()["gradients"] == said
        assert said in bed_cli("status").stdout.replace("\n", " ")


def test_the_line_is_that_of_nccls_log(bed_cli: Cli, clean_bed: Bed) -> None:
    row = ROWS["ports that NCCL joins, one of two pairs used"]
    (bed_cli.cwd / "nccl.log").write_text(row.log)
    write = 'cp nccl.log "${NCCL_DEBUG_FILE%\\%p}$$"; until [ -e "$LAUNCHER_OUTPUT/enough" ]; do sleep 0.1; done'
    with ExitStack() as stack:
        for node in clean_bed.nodes[:2]:
            stack.enter_context(faults.fake_gpus(clean_bed, node, 1))
        job = bed_cli.job(**bed_job(run={"command": ["sh", "-c", write]}, gpus="all"))
        up = bed_cli.start("up", job)
        assert up.stderr is not None
        said = f"gradients: {row.says}"
        while said not in (line := up.stderr.readline()):
            assert line, "it was not said"
        assert json.loads(bed_cli("status", "--json").stdout)["gradients"] == said
        for node in ("node1", "node2"):
            bed_cli("exec", "--node", node, "--", "sh", "-c", 'touch "$LAUNCHER_OUTPUT/enough"')
        up.communicate(timeout=120)
    assert up.returncode == 0
    assert bed_cli.result()["gradients"] == said
    run = bed_cli.runs()[-1]
    assert [event["how"] for event in map(json.loads, (run / "events.jsonl").open()) if event["event"] == "gradients"]
    assert [path.read_text() for path in sorted((run / "logs").glob("node?.nccl.*"))] == [row.log, row.log]
