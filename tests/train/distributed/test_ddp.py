"""Two ranks compute the same as one process on the concatenated batch, and only rank 0 writes."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import SECONDS, Rank, digit_tree, finish, run, start

# 37 images in global batches of 8: the last one has 5, three on rank 0 and two on rank 1
OPTIONS = "--arch smallcnn --image-size 16 --val-resize 16 --augment shift --epochs 3 --lr 0.5 --dtype float64"
EXTRAS = ["--ema-decay", "0.9", "--clip-norm", "1", "--label-smoothing", "0.1", "--nesterov"]
COMMON = (*OPTIONS.split(), *EXTRAS, "--print-digest", "--workers", "1", "--log-every", "3")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 37, 11)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Rank:
    return run(tmp_path_factory.mktemp("alone"), 1, "--data", data, "--batch-size", 8, *COMMON)[0]


@pytest.fixture(scope="module")
def pair(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    return run(tmp_path_factory.mktemp("pair"), 2, "--data", data, "--batch-size", 4, *COMMON)


@pytest.fixture(scope="module")
def accumulated(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    options = ("--batch-size", 2, "--accumulate", 2, "--keep", 2)
    return run(tmp_path_factory.mktemp("accumulated"), 2, "--data", data, *options, *COMMON)


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The largest difference between corresponding weights."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_two_ranks_equal_one_rank_to_1e_10(alone: Rank, pair: list[Rank]) -> None:
    one, two = alone.checkpoint(), pair[0].checkpoint()
    assert one["model"]["classifier.weight"].dtype is torch.float64
    assert distance(one["model"], two["model"]) < 1e-10
    momenta = [
        {str(key): value["momentum_buffer"] for key, value in state["optimizer"]["state"].items()}
        for state in (one, two)
    ]
    assert distance(momenta[0], momenta[1]) < 1e-10


def test_averaged_weights_equal_too(alone: Rank, pair: list[Rank]) -> None:
    one, two = alone.checkpoint(), pair[0].checkpoint()
    assert distance(one["ema"], two["ema"]) < 1e-10
    assert distance(one["ema"], one["model"]) > 1e-4


def test_accumulated_micro_batches_equal_one_batch_to_1e_10(alone: Rank, accumulated: list[Rank]) -> None:
    """The last step's five images are micro-batches of 2 and 1 on rank 0 and one of 2 on rank 1."""
    one, two = alone.checkpoint(), accumulated[0].checkpoint()
    assert distance(one["model"], two["model"]) < 1e-10
    assert accumulated[0].digest == accumulated[1].digest
    assert one["progress"]["updates"] == two["progress"]["updates"] == 15


def test_the_requested_number_of_epoch_checkpoints_is_kept(accumulated: list[Rank]) -> None:
    names = {path.name for path in (accumulated[0].output / "checkpoints").iterdir()}
    assert names == {"last.pt", "previous.pt", "best.pt", "epoch-0002.pt", "epoch-0003.pt"}
    assert accumulated[0].checkpoint("epoch-0002.pt")["progress"]["epoch"] == 2


def test_training_changes_the_weights(alone: Rank) -> None:
    """Otherwise the equality would hold for a trainer that does nothing."""
    losses = [epoch["train"]["loss"] for epoch in alone.metrics("epoch")]
    assert losses[-1] < losses[0] - 0.01


def test_reported_losses_are_over_all_ranks(alone: Rank, pair: list[Rank]) -> None:
    for one, two in zip(alone.metrics("epoch"), pair[0].metrics("epoch"), strict=True):
        assert one["train"]["images"] == two["train"]["images"] == 37
        assert one["train"]["loss"] == pytest.approx(two["train"]["loss"], rel=1e-10)
        assert one["val"] == pytest.approx(two["val"], rel=1e-10)


def test_both_ranks_end_with_the_same_bits(pair: list[Rank]) -> None:
    assert pair[0].digest == pair[1].digest


def test_only_rank_0_writes_and_prints(pair: list[Rank]) -> None:
    assert {path.name for path in pair[0].output.iterdir()} == {"checkpoints", "tensorboard", "metrics.jsonl"}
    assert not pair[1].output.exists()
    assert [line for line in pair[1].lines if not line.startswith("train: rank 1 weights")] == []


def test_a_single_image_in_the_last_batch_trains_with_batch_norm(tmp_path: Path) -> None:
    """17 images in batches of 16 leave 1 for rank 0 and none for rank 1; plain batch norm would reject both."""
    data = digit_tree(tmp_path / "data", 17, 3)
    options = [
        "--arch",
        "cifar_resnet20",
        "--image-size",
        "8",
        "--val-resize",
        "8",
        "--augment",
        "none",
        "--epochs",
        "1",
        "--batch-size",
        "8",
    ]
    first, second = run(tmp_path / "out", 2, "--data", data, "--print-digest", *options)
    assert first.digest == second.digest
    assert first.metrics("epoch")[0]["train"]["images"] == 17
    assert first.metrics("epoch")[0]["val"]["images"] == 3


LEFT = """
import gc, sys
from pathlib import Path
from train.__main__ import main
code = main(sys.argv[1:])
gc.collect()
names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
print("left:", sorted(name for name in names if "gloo" in name or "store" in name), flush=True)
sys.exit(code)
"""


@pytest.mark.ci
def test_no_thread_of_the_process_group_outlives_the_run(data: Path, tmp_path: Path) -> None:
    """Such a thread could abort the process when the interpreter shuts down, after a successful training."""
    ranks = start(tmp_path, 2, "--data", data, "--batch-size", 8, *COMMON, "--epochs", 1, program=("-c", LEFT))
    assert finish(ranks) == [0, 0], ranks[0].text
    assert [rank.lines[-1] for rank in ranks] == ["left: []", "left: []"]


@pytest.mark.ci
def test_a_rank_may_read_for_longer_than_the_timeout_of_a_collective(tmp_path: Path) -> None:
    """Its machine indexes an archive, or downloads a checkpoint, while the others have done so."""
    ranks = run(tmp_path, 2, program=("-m", "tests.train.programs.slow_reader"))
    assert [rank.lines[-1] for rank in ranks] == ["read 0 [0, 1]", "read 1 [0, 1]"]


def test_a_rank_that_is_stopped_before_all_have_joined_joins_them_and_all_stop(data: Path, tmp_path: Path) -> None:
    """Without torchrun, the others would wait --timeout for a rank that has ended."""
    for rank in range(2):
        (tmp_path / str(rank)).symlink_to(data)
    options = (tmp_path, "--batch-size", 4, "--output", tmp_path / "out", *COMMON)
    program = ("tests/train/programs/by_rank.py",)
    ranks = start(tmp_path / "logs", 2, *options, program=program, env={"DEADLINE": str(SECONDS)})
    ranks[0].process.send_signal(signal.SIGSTOP)
    ranks[1].wait_until_it_catches_sigterm()
    ranks[1].process.send_signal(signal.SIGTERM)
    ranks[0].process.send_signal(signal.SIGCONT)
    assert finish(ranks) == [143, 143], ranks[0].text
    assert "the checkpoint is saved" in ranks[0].text


def test_synchronised_batch_norm_with_accumulation_and_an_uneven_last_step(tmp_path: Path) -> None:
    """97 images in steps of 64: rank 0's last 17 make two micro-batches, rank 1's 16 one and an empty one."""
    data = digit_tree(tmp_path / "data", 97, 3)
    options = ["--arch", "cifar_resnet20", "--image-size", 8, "--epochs", 1, "--batch-size", 16, "--timeout", 30]
    extra = ["--accumulate", 2, "--syncbn", "custom", "--print-digest"]
    first, second = run(tmp_path / "out", 2, "--data", data, *options, *extra)
    assert first.digest == second.digest
    assert first.metrics("epoch")[0]["train"]["images"] == 97
