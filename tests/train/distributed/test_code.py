"""Ranks with other code, layers or options than rank 0 are refused before the first step, in one line."""

import shutil
from pathlib import Path

import pytest

from tests.train.runs import ROOT, Rank, finish, run, start

BY_RANK = "tests/train/programs/code_by_rank.py"
QUICK = "--data synthetic:32 --image-size 8 --epochs 1 --batch-size 8 --workers 1 --threads 1 --device cpu"
NETS = """
from torch import nn

from parts import Activation


def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, WIDTH), Activation(), nn.Linear(WIDTH, num_classes))
"""
PARTS = "from torch.nn import ReLU as Activation"


def machines(folder: Path, *own: tuple[str, str]) -> None:
    """Write each rank's modules; own: its `parts` and the width of its model."""
    for rank, (parts, width) in enumerate(own):
        place = folder / str(rank)
        place.mkdir(parents=True, exist_ok=True)
        (place / "parts.py").write_text(parts)
        (place / "nets_by_rank.py").write_text(NETS.replace("WIDTH", width))


def refused(ranks: list[Rank]) -> str:
    """The only line about it."""
    assert finish(ranks) == [2] * len(ranks), ranks[0].text
    (error,) = [line for rank in ranks for line in rank.lines if "error" in line.lower()]
    return error


@pytest.mark.parametrize("method", ["", pytest.param("--parallel dual_batch", marks=pytest.mark.ci)])
def test_another_activation_on_one_rank_is_refused(method: str, tmp_path: Path) -> None:
    """In a module that the model's module imports."""
    machines(tmp_path, (PARTS, "8"), (PARTS.replace("ReLU", "GELU"), "8"))
    options = [tmp_path, *QUICK.split(), "--arch", "nets_by_rank:build", *method.split()]
    if method:
        options += ["--schedule", "multistep", "--augment", "none"]
    ranks = start(tmp_path / "out", 2, *options, program=(BY_RANK,))
    if method:  # torchrun would end the server with it
        assert finish(ranks[1:]) == [2], ranks[1].text
        ranks[0].process.kill()
        error = ranks[1].text
    else:
        error = refused(ranks)
    assert "the code differs from rank 0 (" in error
    assert f"): has parts ({tmp_path}/1/parts.py); copy it from there" in error


def test_other_layers_on_one_rank_are_refused(tmp_path: Path) -> None:
    """Of an installed package, whose files are not compared."""
    installed = tmp_path / "site-packages"
    machines(installed, (PARTS, "8"), (PARTS, "9"))
    options = [installed, *QUICK.split(), "--arch", "nets_by_rank:build"]
    error = refused(start(tmp_path / "out", 2, *options, program=(BY_RANK,)))
    assert "--arch nets_by_rank:build differs from rank 0 (" in error
    assert "has 1.weight: 9x192 torch.float32 here, 8x192 torch.float32 there; install the same packages" in error


@pytest.mark.ci
def test_another_trainer_on_one_rank_is_refused(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        shutil.copytree(ROOT / "train", tmp_path / rank / "train", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "1" / "train" / "loss.py").open("a") as file:
        file.write("# another one\n")
    program = (
        (ROOT / BY_RANK)
        .read_text()
        .replace("sys.argv[1]", f"{str(tmp_path)!r}")
        .replace("sys.argv[2:]", "sys.argv[1:]")
    )
    ranks = start(tmp_path / "out", 2, *QUICK.split(), "--arch", "smallcnn", program=("-c", program))
    assert f"has train.loss ({tmp_path}/1/train/loss.py); copy it from there" in refused(ranks)


@pytest.mark.ci
def test_another_program_with_the_same_modules_is_no_other_code(tmp_path: Path) -> None:
    """A parameter server's worker, which its guard starts as python -m train; a run resumed by python -m train."""
    program = "from train.__main__ import exit_code, leave\nleave(exit_code())"
    (tmp_path / "start.py").write_text(program)
    dual = ["--arch", "smallcnn", "--parallel", "dual_batch", "--schedule", "multistep", "--augment", "none"]
    ranks = run(tmp_path / "dual", 2, *QUICK.split(), *dual, program=(str(tmp_path / "start.py"),))
    assert "code" not in ranks[0].text
    options = [*QUICK.split(), "--arch", "smallcnn"]
    run(tmp_path / "out", 1, *options, program=(str(tmp_path / "start.py"),))
    assert "the code of" not in run(tmp_path / "out", 1, *options, "--epochs", 2)[0].text


@pytest.mark.parametrize("option", ["--pretrained", "--evaluate"])
def test_weights_on_one_rank_only_are_refused(option: str, tmp_path: Path) -> None:
    options = [*QUICK.split(), "--arch", "smallcnn"]
    error = refused(start(tmp_path, 2, *options, own=(f"{option} weights.pt", "")))
    assert f"{option} is not set here, but set on rank 0 (" in error


def test_code_that_has_changed_since_the_checkpoint_is_said(tmp_path: Path) -> None:
    machines(tmp_path, (PARTS, "8"))
    options = [tmp_path, *QUICK.split(), "--arch", "nets_by_rank:build"]
    run(tmp_path / "out", 1, *options, program=(BY_RANK,))
    machines(tmp_path, (PARTS.replace("ReLU", "SiLU"), "8"))
    (again,) = run(tmp_path / "out", 1, *options, "--epochs", 2, program=(BY_RANK,))
    assert f"was saved: the code of parts ({tmp_path}/0/parts.py)" in again.text
    (third,) = run(tmp_path / "out", 1, *options, "--epochs", 3, program=(BY_RANK,))
    assert "the code of" not in third.text
