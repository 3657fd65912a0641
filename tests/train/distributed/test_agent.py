"""agent.py: nodes that die and are restarted individually by their container engines form a new rendezvous."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher import container_scripts
from tests.ports import free_port
from tests.train.forks import Forked

SECONDS = 250
OPTIONS = ("--nnodes", "2", "--node_rank", "1", "--master_addr", "127.0.0.1", "--master_port", "1")
# Each test defines the behaviour of each rank in the first attempt.
PROGRAM = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, seen = dist.get_rank(), Path(os.environ["MARK"] + os.environ["RANK"])
if not seen.exists():
    seen.touch()
    {first}
dist.all_reduce(torch.ones(1))
print("rank", rank, "met", dist.get_world_size(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@dataclass
class Node:
    """A container engine that restarts its one container on failure."""

    rank: int
    folder: Path
    port: int
    restarts: int = 2
    run: str = "mine"
    attempts: int = 0
    code: int | None = None
    output: str = ""
    ended: float = 0.0
    _process: Forked | None = field(default=None, repr=False)

    def keep_up(self) -> None:
        while self.attempts <= self.restarts:
            self.attempts += 1
            self._process = Forked(
                [
                    str(Path(container_scripts.__file__).with_name("agent.py")),
                    *("--nnodes", "2", "--node_rank", str(self.rank), "--nproc_per_node", "1"),
                    *("--master_addr", "127.0.0.1", "--master_port", str(self.port)),
                    *("--rdzv_backend", "static", "--max_restarts", "0", "--no_python"),
                    *(sys.executable, str(self.folder / "program.py")),
                ],
                self.folder,
                {
                    **os.environ,
                    "LAUNCHER_RUN": self.run,
                    "LAUNCHER_OUTPUT": str(self.folder),
                    "LAUNCHER_NODE": f"node{self.rank}",
                    "MARK": str(self.folder / "mark"),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for line in self._process.stdout:
                self.output += line
                if "waiting for the other nodes" in line:
                    (self.folder / "waits").touch()
            self.code, self.ended = self._process.wait(), time.monotonic()
            if self.code == 0:
                return

    def stop(self) -> None:
        self.restarts = 0
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)


def run(folder: Path, first: str, restarts: int = 2, stranger: bool = False) -> list[Node]:
    """Run both nodes until they exit. stranger: a node of another run connects to the port first."""
    (folder / "program.py").write_text(PROGRAM.format(first=first))
    (folder / "state").mkdir()
    port = free_port()
    nodes = [Node(rank, folder, port, restarts) for rank in range(2)]
    threads = [threading.Thread(target=node.keep_up, daemon=True) for node in nodes]
    if stranger:
        nodes.append(Node(1, folder, port, restarts=0, run="other"))
        threads.append(threading.Thread(target=nodes[-1].keep_up, daemon=True))
        threads[0].start()
        threads[2].start()
        threads[2].join(SECONDS)
    for thread in threads[1 if stranger else 0 : 2]:
        thread.start()
    deadline = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [node.rank for node, thread in zip(nodes, threads, strict=True) if thread.is_alive()]
    for node in nodes:
        node.stop()
    for thread in threads:
        thread.join(60)
    assert not stuck, "nodes did not end: " + "".join(f"\n--- {node.rank}\n{node.output}" for node in nodes)
    return nodes


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_node_restarted_before_the_master_noticed_waits_for_the_new_generation(tmp_path: Path) -> None:
    """Rank 1 dies immediately; rank 0 is busy and detects it only when the other node has restarted and waits."""
    busy = f"while not Path({str(tmp_path / 'waits')!r}).exists(): time.sleep(0.1)"
    nodes = run(tmp_path, f"if rank == 1: sys.exit(3)\n    {busy}\n    sys.exit(1)")
    assert [node.code for node in nodes] == [0, 0], "".join(node.output for node in nodes)
    assert [node.attempts for node in nodes] == [2, 2], "one failure must cause one restart of each node"
    assert "waiting for the other nodes" in nodes[1].output
    assert "rank 1 met 2" in nodes[1].output


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_stuck_node_exits_when_the_master_has_failed(tmp_path: Path) -> None:
    nodes = run(tmp_path, "sys.exit(3) if rank == 0 else time.sleep(600)", restarts=0)
    assert all(node.code not in (0, None) for node in nodes)
    late = nodes[1].ended - nodes[0].ended
    print(f"the stuck node ended {late:.1f} s after the master")
    assert "the master exited, but this node is still running" in nodes[1].output


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_node_of_another_run_is_refused_and_both_sides_report_it(tmp_path: Path) -> None:
    master, worker, stranger = run(tmp_path, "pass", restarts=0, stranger=True)
    assert (master.code, worker.code, stranger.code) == (0, 0, 1), master.output + worker.output + stranger.output
    assert f"127.0.0.1:{master.port} belongs to the run mine: refusing to join it" in stranger.output
    assert "rejected a connection to this run's port from node1 of the run other" in master.output
    assert "met" not in stranger.output


def with_fake_torch(folder: Path, torch: str, run: str) -> subprocess.CompletedProcess[str]:
    """Runs the agent with a fake torch package of a version that has no wheel for this Python."""
    file = folder / "torch" / "distributed" / "run.py"
    file.parent.mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(torch)
    (file.parent / "__init__.py").touch()
    processes = file.parent / "elastic" / "multiprocessing"
    processes.mkdir(parents=True)
    (processes / "api.py").write_text(
        "class SignalException(Exception): pass\nclass PContext:\n    def wait(self): pass\n    def close(self): pass\n"
    )
    (processes / "errors.py").write_text("class ChildFailedError(Exception): pass")
    file.write_text(textwrap.dedent(run))
    agent = Path(container_scripts.__file__).with_name("agent.py")
    return subprocess.run(
        [sys.executable, str(agent), *OPTIONS], capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip


@pytest.mark.parametrize("version", ["1.9.0a0+c3d40fd", "1.9.1+cu111"])
def test_plain_torchrun_is_used_if_torch_cannot_share_its_store(tmp_path: Path, version: str) -> None:
    run = """
        import sys
        def main():
            print('torchrun', *sys.argv[1:])
    """
    done = with_fake_torch(tmp_path, f"__version__ = {version!r}\n", run)
    assert (done.stdout, done.returncode) == (f"torchrun {' '.join(OPTIONS)}\n", 0), done.stderr


def test_the_error_of_a_torch_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    done = with_fake_torch(tmp_path, "__version__ = '1.9'\n", "raise ImportError('libcudart.so.12: no such file')")
    assert done.returncode == 1
    assert "ImportError: libcudart.so.12: no such file" in done.stderr
