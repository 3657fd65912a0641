"""Machines with batches of different sizes train as one process with the whole batch, to float64's last digits."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.train.runs import Rank, digit_tree, finish, run, start

# 90 images in steps of 16: the last step of an epoch has 10; group norm, so that an image's output is its own
OPTIONS = "--arch smallcnn --image-size 8 --epochs 2 --dtype float64 --workers 1 --log-every 2 --lr 0.5"


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["--data", str(digit_tree(tmp_path_factory.mktemp("data"), 90, 23)), *OPTIONS.split()]


@pytest.fixture(scope="module")
def whole(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Rank:
    return run(tmp_path_factory.mktemp("whole"), 1, *options, own=["--batch-size 16"])[0]


def same_weights(file: Path, whole: Rank) -> None:
    ours = torch.load(file, weights_only=True)["model"]
    for name, value in whole.checkpoint()["model"].items():
        torch.testing.assert_close(ours[name], value, rtol=1e-11, atol=1e-13)


def same_scores(ours: Rank, theirs: Rank) -> None:
    for mine, other in zip(ours.metrics("epoch"), theirs.metrics("epoch"), strict=True):
        assert mine["val"]["images"] == other["val"]["images"] == 23
        assert mine["val"]["loss"] == pytest.approx(other["val"]["loss"], rel=1e-11)
        assert mine["train"]["loss"] == pytest.approx(other["train"]["loss"], rel=1e-11)


@pytest.mark.parametrize(
    "sizes",
    [
        ["--batch-size 12", "--batch-size 4"],
        ["--batch-size 1 --accumulate 3", "--batch-size 9", "--batch-size 2 --accumulate 2 --val-batch-size 7"],
    ],
)
def test_unequal_batches_train_as_one_process_with_the_whole(
    options: list[str], whole: Rank, tmp_path: Path, sizes: Sequence[str]
) -> None:
    ranks = run(tmp_path, len(sizes), *options, own=sizes)
    same_weights(ranks[0].output / "checkpoints" / "last.pt", whole)
    same_scores(ranks[0], whole)
    (begun,) = ranks[0].metrics("start")
    assert begun["global_batch"] == 16
    parts = {2: "(12 + 4)", 3: "(3 + 9 + 4)"}[len(sizes)]
    assert f"global batch 16 {parts}, 12 steps" in ranks[0].text


def test_a_run_resumes_with_other_shares(options: list[str], whole: Rank, tmp_path: Path) -> None:
    """Within an epoch: the order of images does not depend on who reads them."""
    common = [*options, "--checkpoints", tmp_path / "checkpoints", "--log-every", 1]
    ranks = start(tmp_path, 2, *common, own=["--batch-size 12", "--batch-size 4"])
    ranks[0].wait_for("Epoch: [1][2/6]")
    ranks[1].process.send_signal(signal.SIGTERM)
    assert finish(ranks) == [143, 143], ranks[0].text
    again = run(tmp_path, 2, *common, own=["--batch-size 5", "--batch-size 11"])
    assert "resumed" in again[0].text
    same_weights(tmp_path / "checkpoints" / "last.pt", whole)


@pytest.mark.parametrize(("method", "nodes", "sizes"), [("fsdp", 1, (12, 4)), ("hsdp", 2, (6, 6, 3, 1))])
def test_shards_of_unequal_batches(
    options: list[str], whole: Rank, tmp_path: Path, method: str, nodes: int, sizes: Sequence[int]
) -> None:
    common = [*options, "--parallel", method, "--checkpoints", tmp_path / "checkpoints"]
    ranks = run(tmp_path, len(sizes), *common, nodes=nodes, own=[f"--batch-size {size}" for size in sizes])
    same_scores(ranks[0], whole)


def test_a_smaller_world_keeps_the_batch_of_all(options: list[str], whole: Rank, tmp_path: Path) -> None:
    """As it does after the loss of a machine, whose batch is known from the checkpoint only."""
    sizes = ["--batch-size 8", "--batch-size 6", "--batch-size 2"]
    refused = start(tmp_path / "refused", 2, *options, own=sizes[:2], env={"LAUNCHER_FULL_WORLD": "3"})
    assert finish(refused) == [2, 2]
    assert "1 of 3 processes are missing" in refused[0].text
    common = [*options, "--checkpoints", tmp_path / "checkpoints", "--log-every", 1]
    three = start(tmp_path / "three", 3, *common, own=sizes)
    three[0].wait_for("Epoch: [1][2/6]")
    three[2].process.send_signal(signal.SIGTERM)
    assert finish(three) == [143] * 3, three[0].text
    two = run(tmp_path / "two", 2, *common, own=sizes[:2], env={"LAUNCHER_FULL_WORLD": "3"})
    assert "global batch 16 (8 + 6)" in two[0].text
    same_weights(tmp_path / "checkpoints" / "last.pt", whole)


@pytest.mark.parametrize(
    ("more", "own", "message"),
    [
        ("", ["--lr 0.5", "--lr 0.25"], "--lr is 0.25 here, but 0.5 on rank 0"),
        ("", ["--log-every 2", "--log-every 3"], "--log-every is 3 here, but 2 on rank 0"),
        ("--parallel model", ["--batch-size 8", "--batch-size 4"], "--batch-size is 4 here, but 8 on rank 0"),
    ],
)
def test_other_options_must_be_the_same(
    options: list[str], tmp_path: Path, more: str, own: Sequence[str], message: str
) -> None:
    ranks = start(tmp_path, 2, *options, *more.split(), own=own)
    assert finish(ranks) == [2, 2]
    assert any(message in rank.text for rank in ranks), ranks[1].text
    assert not (ranks[0].output / "checkpoints").exists()
