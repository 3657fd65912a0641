"""Every validation image counts exactly once on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.train.runs import digit_tree, finish, start
from train.__main__ import main
from train.data.batch import Batch
from train.evaluate import SHOWN, Mistaken

COUNTS = (1, 5, 10, 101)
CASES = ((1, "exact"), (2, "exact"), (3, "exact"), (2, "scatter"), (3, "scatter"))
WORKER = ("tests/train/programs/validation_worker.py",)


def validate(folder: Path, world: int, way: str) -> list[list[dict[str, Any]]]:
    """Each rank's results for each data set."""
    ranks = start(folder / "out", world, folder, way, *(str(count) for count in COUNTS), program=WORKER)
    assert finish(ranks) == [0] * world, ranks[0].text
    return [[json.loads(line) for line in rank.lines if line.startswith("{")] for rank in ranks]


@pytest.fixture(scope="module")
def by_world(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("validation")
    for count in COUNTS:
        digit_tree(folder / str(count), 24, count)
    return {(world, way): validate(folder, world, way) for world, way in CASES}


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_image_counts_once_on_every_rank(
    by_world: dict[tuple[int, str], list[list[dict[str, Any]]]], case: tuple[int, str]
) -> None:
    for reports in by_world[case]:
        assert [report["images"] for report in reports] == list(COUNTS)


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_scores_equal_those_of_one_process(
    by_world: dict[tuple[int, str], list[list[dict[str, Any]]]], case: tuple[int, str]
) -> None:
    alone = by_world[1, "exact"][0]
    for reports in by_world[case]:
        for ours, theirs in zip(reports, alone, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
            assert ours["top1"] == theirs["top1"]


def test_validation_in_intervals_with_a_separate_batch_size(tmp_path: Path) -> None:
    """After epochs 2 and 4, and after the last: in batches of 3, four for ten images."""
    data = digit_tree(tmp_path / "data", 10, 10)
    options = (
        "--arch smallcnn --image-size 8 --batch-size 8 --epochs 5 --val-interval 2 --val-batch-size 3 --log-every 1"
    )
    common = ["--data", str(data), "--output", str(tmp_path / "out"), "--workers", "1", "--threads", "1"]
    assert main([*common, *options.split()]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [2, 4, 5]
    assert [line["val"]["images"] for line in lines if line["kind"] == "epoch"] == [10, 10, 10]
    state = torch.load(tmp_path / "out" / "checkpoints" / "previous.pt", weights_only=True)
    assert state["progress"]["validated"] == 4


def test_the_first_mistakes_are_kept_whatever_the_batches() -> None:
    """Images 0 to 99 in batches of 7; every third is misclassified. Images with weight 0 do not count."""
    mistaken, side = Mistaken(), 8
    numbers = torch.arange(105)
    for part in numbers.split(7):
        images = part.to(torch.uint8).view(-1, 1, 1, 1).expand(-1, side, side, 3).contiguous()
        wrong, weights = part % 3 == 0, (part < 100).float()
        logits = functional.one_hot(torch.where(wrong, 1, 0), 2).float()
        mistaken.add(Batch(images, torch.zeros(len(part), dtype=torch.int64), weights, 105, last=True), logits)
        images.zero_()  # the loader's memory is used again
    assert mistaken.images(side)[:, 0, 0, 0].tolist() == list(range(0, 96, 3))[:SHOWN]
    few = Mistaken()
    assert few.images(side).shape == (0, side, side, 3)
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    images, weights = torch.arange(3).byte().view(3, 1, 1, 1).expand(3, side, side, 3), torch.tensor([1.0, 1.0, 0.0])
    few.add(Batch(images, torch.zeros(3, dtype=torch.int64), weights, 3, last=True), logits)
    assert few.images(side)[:, 0, 0, 0].tolist() == [1]
