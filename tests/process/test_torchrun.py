"""Plain processes that run torchrun."""

from __future__ import annotations

import sys

import pytest

from launcher.model.container import ContainerSpec
from tests.ports import free_port
from tests.process.machine import Machine

WORKERS = """
import os, signal, sys, time
import torch, torch.distributed as dist
attempt = len(open(os.environ["LAUNCHER_OUTPUT"] + "/state/local-0.attempts").read().split("start")) - 1
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("rank", dist.get_rank(), "attempt", attempt, "sum", int(total), flush=True)
if attempt == 1:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(total)  # fails when the other rank has exited
        time.sleep(0.1)
dist.destroy_process_group()
"""


@pytest.mark.ci
def test_a_killed_worker_restarts_both_nodes_and_the_run_finishes(machine: Machine) -> None:
    port = free_port()

    def node(rank: int) -> ContainerSpec:
        kit_folder = machine.output / ".node" / f"local-{rank}" / "kit"
        program = (
            f"exec {sys.executable} -m torch.distributed.run --nnodes 2 --node_rank {rank} --nproc_per_node 1"
            f" --master_addr 127.0.0.1 --master_port {port} --rdzv_backend static --max_restarts 0"
            f" --no_python sh {kit_folder}/rank.sh {sys.executable} workers.py"
        )
        return machine.spec(program, rank, restarts=2, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

    pairs = [machine.start(node(rank), **{"workers.py": WORKERS}) for rank in (0, 1)]
    states = [engine.wait(name, 150) for engine, name in pairs]
    assert [state.exit_code for state in states] == [0, 0], machine.log(0) + machine.log(1)
    assert all(state.restarts >= 1 for state in states)
    for rank in (0, 1):
        lines = (machine.output / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} attempt 1 sum 2" in lines
        assert f"rank {rank} attempt 2 sum 2" in lines
    machine.until(lambda: not machine.alive())  # torchrun may exit before a process that it has killed
