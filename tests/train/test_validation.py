"""Every validation image counts exactly once on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.train.runs import digit_tree, finish, start

COUNTS = (1, 5, 10, 101)
CASES = ((1, "exact"), (2, "exact"), (3, "exact"), (2, "scatter"), (3, "scatter"))
WORKER = ("tests/train/validation_worker.py",)


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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_image_counts_once_on_every_rank(
    by_world: dict[tuple[int, str], list[list[dict[str, Any]]]], case: tuple[int, str]
) -> None:
    for reports in by_world[case]:
        assert [report["images"] for report in reports] == list(COUNTS)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_scores_equal_those_of_one_process(
    by_world: dict[tuple[int, str], list[list[dict[str, Any]]]], case: tuple[int, str]
) -> None:
    alone = by_world[1, "exact"][0]
    for reports in by_world[case]:
        for ours, theirs in zip(reports, alone, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
            assert ours["top1"] == theirs["top1"]
