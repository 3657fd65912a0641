"""A parameter server and its workers as real processes over torch RPC."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.train.runs import digit_tree, finish, run, start
from train import checkpoint

OPTIONS = (
    "--arch smallcnn --image-size 16 --val-resize 16 --augment none --workers 1 --device cpu --parallel dual_batch"
)
COMMON = [*OPTIONS.split(), "--schedule", "multistep", "--warmup", "0", "--lr", "0.1", "--lr-scaling", "none"]
UNGUARDED = ("tests/train/programs/unguarded.py",)  # where no worker dies
COSTS = ["--dual-a", "0.001", "--dual-b", "0.02", "--dual-ratio", "1.1"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 200, 50)


@pytest.mark.ci
@pytest.mark.parametrize("merge", ["asp", "bsp", "ssp"])
def test_every_round_is_finished_and_recorded(data: Path, tmp_path: Path, merge: str) -> None:
    options = ["--data", data, "--epochs", 3, "--batch-size", 50, "--dual-small", 1, "--dual-merge", merge, *COSTS]
    first = run(tmp_path, 3, *COMMON, *options, program=UNGUARDED)[0]
    end, start_facts = first.metrics("end")[0], first.metrics("start")[0]
    assert (end["granted"], end["finished"], end["lost"]) == (6, 6, [])
    epochs = first.metrics("epoch")  # a round may end while the previous one is being validated
    assert {epoch["val"]["images"] for epoch in epochs} == {50}
    assert epochs[-1]["epoch"] == 3
    assert sum(epoch["train"]["images"] for epoch in epochs) >= 6 * 90
    assert start_facts["plan"] == {
        "batch_small": start_facts["plan"]["batch_small"],
        "batch_large": 50,
        "samples_small": 90,
        "samples_large": 110,
        "factor": 90 / 110,
    }
    assert start_facts["devices"] == 2
    state = first.checkpoint()
    assert state["dual_batch"]["finished"] == 6
    del state["sha256"]
    state["dual_batch"]["finished"] = 5  # as if it had been stopped within the third round
    checkpoint.write(first.output / "checkpoints" / "last.pt", state)
    again = run(tmp_path, 3, *COMMON, *options[:3], 4, *options[4:], program=UNGUARDED)[0]
    assert re.search(r"resumed .* after 5 local epochs", again.text)
    assert again.metrics("end")[-1]["finished"] == 8
    assert again.metrics("epoch")[-1]["epoch"] == 4


def test_image_sizes_change_with_the_rounds(data: Path, tmp_path: Path) -> None:
    """The follow-up's cycle of image sizes, with its merge: 16, 24 and 16 pixels."""
    options = ["--data", data, "--epochs", 3, "--batch-size", 50, "--phases", "16@0", "24@0.33", "16@0.66"]
    first = run(tmp_path, 2, *COMMON, *options, "--dual-variant", "follow_up", program=UNGUARDED)[0]
    assert first.metrics("end")[0]["finished"] == 3
    assert first.metrics("start")[0]["config"]["phases"] == ["16@0", "24@0.33", "16@0.66"]


@pytest.mark.ci
def test_a_killed_worker_is_reported_and_the_run_continues(data: Path, tmp_path: Path) -> None:
    options = ["--data", data, "--epochs", 8, "--batch-size", 10, "--timeout", 10]
    ranks = start(tmp_path, 3, *COMMON, *options)
    ranks[0].wait_for("Epoch: [")
    os.kill(ranks[2].process.pid, signal.SIGKILL)
    assert finish(ranks) == [0, 0, -signal.SIGKILL]
    end = ranks[0].metrics("end")[0]
    assert (end["granted"], end["finished"]) == (16, 16)
    assert [lost["rank"] for lost in end["lost"]] == [2]
    assert ranks[0].text.count("rank 2 is lost (no heartbeat for 10 s") == 1


@pytest.mark.ci
def test_sigterm_to_all_or_to_the_server_alone_saves_the_finished_local_epochs(data: Path, tmp_path: Path) -> None:
    """Rounds take less than the server's longest wait, and the workers may leave before it has seen its signal."""
    options = ["--data", data, "--epochs", 5000, "--batch-size", 100]
    for number, stopped in enumerate(((0, 1, 2), (1, 2, 0), (0,))):
        ranks = start(tmp_path / str(number), 3, *COMMON, *options, program=UNGUARDED)
        ranks[0].wait_for("Epoch: [")
        for rank in stopped:
            ranks[rank].process.send_signal(signal.SIGTERM)
        codes = finish(ranks)
        assert codes[0] == 143, ranks[0].text
        assert set(codes[1:]) <= {0, 143}  # 0: the server had closed before the worker saw its signal
        found = re.search(r"stopped after (\d+) ", ranks[0].text)
        assert found, ranks[0].text
        saved = int(found[1])
        assert ranks[0].checkpoint()["dual_batch"]["finished"] == saved >= 2


def test_a_worker_that_waits_for_the_others_ends_on_sigterm(data: Path, tmp_path: Path) -> None:
    """The server never joins."""
    (tmp_path / "1").symlink_to(data)
    env = {"STUCK": "none"}  # this program then has a short deadline
    ranks = start(
        tmp_path, 2, tmp_path, *COMMON, "--batch-size", 10, program=("tests/train/programs/by_rank.py",), env=env
    )
    ranks[0].process.kill()
    ranks[1].wait_until_it_catches_sigterm()
    ranks[1].process.send_signal(signal.SIGTERM)
    assert ranks[1].process.wait(60) == 143, ranks[1].text


@pytest.mark.ci
def test_a_killed_server_ends_the_workers(data: Path, tmp_path: Path) -> None:
    ranks = start(tmp_path, 3, *COMMON, "--data", data, "--epochs", 500, "--batch-size", 10, "--timeout", 10)
    ranks[0].wait_for("Epoch: [")
    ranks[0].process.kill()
    killed = time.monotonic()
    assert finish(ranks)[1:] == [2, 2]
    assert time.monotonic() - killed < 120  # the time limit is 10 s; a hang would not end
    assert "the parameter server (rank 0, 127.0.0.1) does not respond" in ranks[1].text


@pytest.mark.ci
def test_all_workers_lost_is_a_failure(data: Path, tmp_path: Path) -> None:
    ranks = start(tmp_path, 2, *COMMON, "--data", data, "--epochs", 500, "--batch-size", 10, "--timeout", 8)
    ranks[0].wait_for("Epoch: [")
    ranks[1].process.kill()
    assert finish(ranks)[0] == 2
    assert "all workers are lost: rank 1" in ranks[0].text
    assert (ranks[0].output / "checkpoints" / "last.pt").exists()


def test_impossible_plans_are_refused(data: Path, tmp_path: Path) -> None:
    ranks = start(tmp_path, 2, *COMMON, "--data", data, "--batch-size", 50, "--dual-small", 1)
    assert finish(ranks) == [2, 2]
    assert "both must be greater than 0" in ranks[0].text
