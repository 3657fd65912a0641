"""--gradient-compression powersgd: equal to DDP at full rank, exact resume on two and three ranks, its checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.train.runs import Rank, digit_tree, run
from train.distributed.powersgd import check_model, sent
from train.errors import TrainError

OPTIONS = (
    "--arch smallcnn --image-size 16 --epochs 2 --workers 1 --threads 1 --device cpu --lr 0.5 --keep 2 --print-digest "
    "--gradient-compression powersgd:2 --bucket-mb 0.05"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 36, 8)


def ended(folder: Path, world: int, data: Path, *more: object) -> list[Rank]:
    common = ["--data", data, "--checkpoints", folder / "checkpoints", *OPTIONS.split(), "--batch-size", 12 // world]
    return run(folder, world, *common, *more)


@pytest.fixture(scope="module", params=[2, 3])
def whole(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Rank]:
    folder = tmp_path_factory.mktemp("whole")
    return ended(folder, request.param, data)


@pytest.mark.ci
def test_a_resumed_run_ends_like_an_uninterrupted_one(whole: list[Rank], data: Path, tmp_path: Path) -> None:
    (first,) = (whole[0].output.parent / "checkpoints").glob("epoch-0001.*")
    resumed = ended(tmp_path, len(whole), data, "--resume", first)
    assert f"resumed {first} at epoch 2, step 0" in resumed[0].text
    assert {rank.digest for rank in (*whole, *resumed)} == {whole[0].digest}
    before, after = (
        torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["compression"]
        for folder in (whole[0].output.parent, tmp_path)
    )
    assert len(before["errors"]) == len(whole)
    assert len(before["errors"][0]) > 2  # buckets
    assert any(matrix.numel() for matrix in before["p"])  # something was compressed
    for mine, theirs in zip(before["errors"], after["errors"], strict=True):
        assert any(error.any() for error in mine)
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.ci
def test_another_number_of_ranks_begins_with_zero_errors_and_says_so(
    whole: list[Rank], data: Path, tmp_path: Path
) -> None:
    (first,) = (whole[0].output.parent / "checkpoints").glob("epoch-0001.*")
    world = 5 - len(whole)
    resumed = ended(tmp_path, world, data, "--resume", first)
    told = f"its gradients were compressed on {len(whole)} ranks, not {world}; what was still to be sent is dropped"
    assert f"train: {first}: {told}" in resumed[0].lines
    state = torch.load(tmp_path / "checkpoints" / "last.pt", weights_only=True)
    assert len(state["compression"]["errors"]) == world


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.ci)])
def test_full_rank_equals_ddp_and_zero_gradients_stay_finite(world: int, tmp_path: Path) -> None:
    ranks = run(tmp_path, world, program=("tests/train/programs/powersgd_worker.py",))
    for rank in ranks:
        found = json.loads(rank.lines[-1])
        assert found["full"]["difference"] < 1e-10
        assert found["full"]["compressed"] > 10_000  # numbers of the first matrices
        assert found["full"]["buckets"] > 2
        assert found["finite"]


def test_what_is_sent_of_each_shape() -> None:
    assert sent([(64, 3, 3, 3)], 1) == 64 + 27
    assert sent([(64, 3, 3, 3)], 4) == 4 * (64 + 27)
    assert sent([(64, 3, 3, 3)], 16) == 64 * 27  # two matrices of rank 16 would be almost as large
    assert sent([(512,), (2, 512)], 4) == 512 + 2 * 512
    assert sent([(1000, 512), (1000,)], 2) == 2 * 1512 + 1000


@pytest.mark.parametrize(
    ("parameter", "what"),
    [
        (nn.Parameter(torch.ones(())), "is a number without dimension"),
        (nn.Parameter(torch.ones(0, 3)), "has no elements"),
    ],
)
def test_a_parameter_without_rows_is_refused_by_name(parameter: nn.Parameter, what: str) -> None:
    model = nn.Linear(4, 4)
    check_model("powersgd:2", model)
    model.register_parameter("scale", parameter)
    with pytest.raises(TrainError, match=f"--gradient-compression powersgd:2: the parameter scale {what}"):
        check_model("powersgd:2", model)
    parameter.requires_grad_(False)
    check_model("powersgd:2", model)
