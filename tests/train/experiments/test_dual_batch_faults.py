"""Workers that are slow, killed or out of memory, alone and under torchrun: the run finishes with the others."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.ports import free_port
from tests.train.experiments.test_dual_batch_run import COMMON, UNGUARDED
from tests.train.runs import ROOT, SECONDS, STARTED, Rank, digit_tree, finish, start
from train import checkpoint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 200, 50)


def worker_of(process: int, rank: int) -> int:
    """The pid of this rank's guarded process below `process`, found by its environment."""
    todo = [process]
    while todo:
        pid = todo.pop()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        todo += map(int, children)
        env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in env and any(entry.startswith(b"TRAIN_GUARDED_BY=") for entry in env):
            return pid
    raise AssertionError(f"no worker of rank {rank} below {process}")


@contextmanager
def a_fifth_of_the_time(pid: int) -> Iterator[None]:
    """Lets the process run 20 ms of every 100, so it is five times slower."""
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            over.wait(0.08)
            os.kill(pid, signal.SIGCONT)
            over.wait(0.02)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def assert_all_was_done(server: Rank, local_epochs: int, lost: list[int]) -> None:
    end = server.metrics("end")[0]
    assert (end["granted"], end["finished"]) == (local_epochs, local_epochs)
    assert [each["rank"] for each in end["lost"]] == lost


@pytest.mark.ci
@pytest.mark.parametrize("merge", ["asp", "ssp", "bsp"])
def test_the_number_of_grants_is_exact_with_a_worker_at_a_fifth_of_the_speed(
    data: Path, tmp_path: Path, merge: str
) -> None:
    options = ["--data", data, "--epochs", 4, "--batch-size", 25, "--dual-merge", merge, "--timeout", 30]
    ranks = start(tmp_path, 4, *COMMON, *options, program=UNGUARDED)
    ranks[0].wait_for("Epoch: [")
    with a_fifth_of_the_time(ranks[1].process.pid):
        ranks[0].wait_for("Epoch: [4]")
    assert finish(ranks) == [0] * 4
    assert_all_was_done(ranks[0], 12, [])


@pytest.mark.ci
def test_a_worker_killed_under_torchrun_does_not_end_the_others(data: Path, tmp_path: Path) -> None:
    """A server and two workers on one node: without the guard, torchrun would end them all."""
    torchrun = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "3", "--max-restarts", "0"]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--rdzv-backend", "static"]
    options = ["--data", str(data), "--epochs", "8", "--batch-size", "10"]
    process = subprocess.Popen(
        [sys.executable, *torchrun, *meeting, "-m", "train", *COMMON, *options],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "LAUNCHER_OUTPUT": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    STARTED.append(process)
    node = Rank(process, tmp_path)
    threading.Thread(target=node.read, daemon=True).start()
    node.wait_for("Epoch: [")
    os.kill(worker_of(process.pid, 2), signal.SIGKILL)
    assert finish([node]) == [0], node.text
    assert_all_was_done(node, 16, [2])
    assert "killed by SIGKILL on" in node.metrics("end")[0]["lost"][0]["why"]
    assert node.text.count("rank 2 is lost (killed by SIGKILL on") == 1


@pytest.mark.ci
def test_a_worker_out_of_memory_is_reported_and_the_run_continues(data: Path, tmp_path: Path) -> None:
    """Rank 2 may use 150 MB more than when training begins: its first batch of 200 does not fit."""
    options = ["--data", data, "--arch", "cifar_resnet20", "--image-size", 32, "--val-resize", 32, "--epochs", 2]
    ranks = start(
        tmp_path,
        3,
        *COMMON,
        *options,
        "--batch-size",
        200,
        program=("tests/train/programs/little_memory.py", "2", "150"),
    )
    assert finish(ranks) == [0] * 3, ranks[2].text
    assert_all_was_done(ranks[0], 4, [2])
    assert ranks[0].text.count("rank 2 is lost (out of memory on") == 1, ranks[0].text
    assert "train: worker 1 (rank 2) stopped: out of memory: " in ranks[2].text


@pytest.mark.ci
def test_a_worker_whose_gradient_is_nan_pushes_nothing(data: Path, tmp_path: Path) -> None:
    """And a checkpoint that is not finite is not resumed."""
    options = ["--data", data, "--arch", "tests.train.programs.diverging:sick", "--batch-size", 50]
    options += ["--dual-merge", "bsp"]  # however slow rank 2 is, the other one waits for its first push
    poison = {"POISONED_STEP": "1", "POISONED_RANK": "2"}
    ranks = start(tmp_path, 3, *COMMON, *options, "--epochs", 2, program=UNGUARDED, env=poison)
    assert finish(ranks) == [0] * 3, ranks[2].text
    assert_all_was_done(ranks[0], 4, [2])
    assert "rank 2 is lost (TrainError on " in ranks[0].text
    assert "a gradient is inf or nan: training diverged" in ranks[0].text
    last = ranks[0].output / "checkpoints" / "last.pt"
    state = ranks[0].checkpoint()
    assert state["model"]["classifier.weight"].isfinite().all()
    state["model"]["norm.running_mean"][0] = torch.nan
    del state["sha256"]
    checkpoint.write(last, state)
    again = start(tmp_path, 3, *COMMON, *options, "--epochs", 3, program=UNGUARDED)
    assert finish(again) == [0] * 3, again[0].text
    assert f"train: {last}: inf or nan in norm.running_mean; using another checkpoint" in again[0].text
    assert f"resumed {last.with_name('previous.pt')} after " in again[0].text


@pytest.mark.ci
def test_a_worker_that_dies_before_all_have_joined_fails_the_run_immediately(data: Path, tmp_path: Path) -> None:
    """Rank 2 never starts, so the others wait; the guard of rank 1 cannot report the loss and exits with the signal."""
    ranks = start(tmp_path, 3, *COMMON, "--data", data, "--epochs", 2, "--batch-size", 10)
    ranks[2].process.kill()
    deadline = time.monotonic() + SECONDS
    pid = None
    while pid is None and time.monotonic() < deadline:
        try:
            pid = worker_of(ranks[1].process.pid, 1)
        except AssertionError:
            time.sleep(0.05)  # until the guard has started it
    assert pid is not None
    ranks[0].wait_for("parameter server with")
    os.kill(pid, signal.SIGKILL)
    assert ranks[1].process.wait(60) == 128 + signal.SIGKILL
    ranks[0].process.kill()
    finish(ranks)
