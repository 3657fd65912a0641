"""Gradients, weights and scores that are inf or nan: no checkpoint gets them, and none that has them is resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import Rank, digit_tree, finish, start
from train import checkpoint
from train.__main__ import main

QUICK = "--epochs 2 --image-size 8 --batch-size 4 --workers 1 --threads 1 --device cpu --lr 0.01 --log-every 100"
NETS = "tests.train.programs.diverging"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digit_tree(tmp_path_factory.mktemp("data"), 48, 8)


def begin(output: Path, ranks: int, data: Path, *options: object, arch: str = "sick", **poison: object) -> list[Rank]:
    """poison: the step whose gradient is nan, and the rank."""
    common = ["--data", data, "--arch", f"{NETS}:{arch}", *QUICK.split()]
    return start(output, ranks, *common, *options, env={f"POISONED_{key}".upper(): str(v) for key, v in poison.items()})


def check(state: dict[str, Any]) -> None:
    for name, value in state["model"].items():
        assert name == "mask" or value.isfinite().all(), name


@pytest.mark.parametrize(
    ("ranks", "options", "passes"),
    [
        (1, "", 1),
        pytest.param(1, "--amp bf16 --clip-norm 1", 1, marks=pytest.mark.ci),
        pytest.param(1, "--parallel dp", 2, marks=pytest.mark.ci),
        (2, "--ema-decay 0.9", 1),
    ],
)
def test_a_gradient_of_nan_ends_the_run_before_a_checkpoint_gets_it(
    ranks: int, options: str, passes: int, data: Path, tmp_path: Path
) -> None:
    """The last step before the second checkpoint within an epoch; its loss is finite."""
    common = [*options.split(), "--checkpoint-every", 2]
    found = begin(tmp_path, ranks, data, *common, step=4 * passes, rank=ranks - 1)
    assert finish(found) == [2] * ranks, found[0].text
    (error,) = [line for rank in found for line in rank.lines if "error" in line]
    assert "a gradient was inf or nan, though the loss was not, in the steps before epoch 1, step 4" in error
    state = found[0].checkpoint()
    assert (state["progress"]["epoch"], state["progress"]["step"]) == (0, 2)
    check(state)
    again = begin(tmp_path, ranks, data, *common)
    assert finish(again) == [0] * ranks, again[0].text
    assert "resumed" in again[0].text
    check(again[0].checkpoint())


@pytest.mark.ci
@pytest.mark.parametrize(("method", "last"), [("fsdp", 6), ("pipeline --micro-batches 2 --last-batch drop", 24)])
def test_one_ranks_part_of_a_gradient_ends_all_ranks(method: str, last: int, data: Path, tmp_path: Path) -> None:
    """The first stage's, for example; in the last step of the epoch."""
    options = f"--parallel {method} --checkpoints {tmp_path}/checkpoints".split()
    found = begin(tmp_path, 2, data, *options, arch="chain", step=last, rank=0)
    assert finish(found) == [2, 2], found[0].text
    assert [line for rank in found for line in rank.lines if "a gradient was inf or nan" in line], found[0].text
    assert not [*tmp_path.glob("checkpoints/last*")]


@pytest.fixture(scope="module")
def saved(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder of a run of two epochs."""
    output: Path = tmp_path_factory.mktemp("saved")
    (rank,) = begin(output, 1, data, "--optimizer", "adamw", "--ema-decay", 0.9)
    assert finish([rank]) == [0], rank.text
    return rank.output / "checkpoints"


def weight(state: dict[str, Any]) -> None:
    state["model"]["classifier.weight"][0, 0] = torch.inf


def statistic(state: dict[str, Any]) -> None:
    state["model"]["norm.running_var"][1] = torch.inf


def moment(state: dict[str, Any]) -> None:
    state["optimizer"]["state"][3]["exp_avg_sq"].view(-1)[-1] = torch.nan


def average(state: dict[str, Any]) -> None:
    state["ema"]["classifier.bias"][2] = torch.nan


def nothing(state: dict[str, Any]) -> None:
    """The mask of the model is -inf."""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (weight, "inf or nan in classifier.weight"),
        (statistic, "inf or nan in norm.running_var"),
        (moment, "inf or nan in exp_avg_sq of "),
        (average, "inf or nan in the average of classifier.bias"),
        (nothing, ""),
    ],
)
def test_the_checkpoint_before_one_that_is_not_finite_is_resumed(
    change: Callable[[dict[str, Any]], None],
    named: str,
    saved: Path,
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "checkpoints"
    target.mkdir()
    for name in ("last.pt", "previous.pt"):
        state = torch.load(saved / name, weights_only=True)
        del state["sha256"]
        if name == "last.pt":
            change(state)
        checkpoint.write(target / name, state)
    options = ["--data", str(data), "--arch", f"{NETS}:sick", *QUICK.split(), "--optimizer", "adamw"]
    options += ["--output", str(tmp_path), "--ema-decay", "0.9", "--epochs", "3"]
    if named:
        given = [*options, "--resume", str(target / "last.pt")]
        assert main(given) == 2  # it was named
        assert named in capfd.readouterr().err
    assert main(options) == 0
    said = capfd.readouterr().out
    path, epoch = ("previous.pt", 2) if named else ("last.pt", 3)
    assert f"train: resumed {target}/{path} at epoch {epoch}, step 0" in said
    assert (f"train: {target}/last.pt: {named}" in said) is bool(named)


@pytest.mark.ci
def test_shards_that_are_not_finite_are_not_resumed(data: Path, tmp_path: Path) -> None:
    options = ["--parallel", "fsdp", "--checkpoints", tmp_path / "checkpoints"]
    found = begin(tmp_path, 2, data, *options, "--allow-nan", step=7, rank=0)  # the first of the second epoch
    assert finish(found) == [0, 0], found[0].text
    again = begin(tmp_path, 2, data, *options)
    assert finish(again) == [0, 0], again[0].text
    assert "last.sharded: inf or nan in " in again[0].text
    assert f"resumed {tmp_path}/checkpoints/previous.sharded at epoch 2, step 0" in again[0].text


@pytest.mark.parametrize("amp", ["none", "fp16"])
def test_a_validation_of_nan_is_an_error(
    amp: str,
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With a loss scale too: it is the steps that would be skipped."""
    options = ["--data", str(data), "--arch", f"{NETS}:blind", *QUICK.split(), "--output", str(tmp_path)]
    assert main([*options, "--amp", amp]) == 2
    assert "the loss is nan at epoch 1, validation" in capfd.readouterr().err
    assert not (tmp_path / "checkpoints" / "last.pt").exists()
