"""The user's own functions in place of an option's choices."""

from pathlib import Path

import pytest
import torch

from tests.train.runs import run
from train.__main__ import main
from train.arguments import OWN
from train.config import Config, parse
from train.errors import TrainError
from train.loss import Mix, cross_entropy, losses, make_loss
from train.own import own
from train.schedule import make_schedule

QUICK = "--arch smallcnn --image-size 8 --epochs 1 --batch-size 4 --workers 1 --threads 1 --device cpu"
MODULE = """
import torch
from torch.nn import functional


def ce(logits, labels):
    return functional.cross_entropy(logits, labels, reduction="none")


def one(logits):
    return logits.sum(1)


def mean(logits, labels):
    return functional.cross_entropy(logits, labels)


def text(logits, labels):
    return "0.3"


def hits(logits, labels):
    return (logits.argmax(1) == labels).float()


def wrong(logits, labels):
    return functional.cross_entropy(logits, labels[:2])


def half(step, steps):
    return 1 - step / steps / 2


def past(step, steps):
    return [1.0, 0.5][step]


def negative(step, steps):
    return 0.5 - step


number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a user module, different in every test because modules are imported once."""
    name = f"own_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def refused(capfd: pytest.CaptureFixture[str], tmp_path: Path, *options: str) -> str:
    """The one line of a run that is refused."""
    assert main([*QUICK.split(), "--data", "synthetic:9", "--output", str(tmp_path / "out"), *options]) == 2
    (error,) = capfd.readouterr().err.splitlines()
    return error


@pytest.mark.parametrize(
    ("option", "function", "line", "says"),
    [
        ("loss", "no_such", "", "has no function no_such"),
        ("loss", "number", "", "has no function number"),
        ("loss", "one", 10, "too many positional arguments; it is called as f(logits, labels)"),
        ("loss", "mean", 14, "it returned shape () for logits of shape (3, 9); it is called as f(logits, labels)"),
        (
            "loss",
            "text",
            18,
            "it returned a str; it is called as f(logits, labels), and must return a tensor of shape (n,)",
        ),
        ("loss", "hits", 22, "it returned values without a gradient"),
        ("loss", "wrong", 27, "ValueError: Expected input batch_size (3) to match target batch_size (2)"),
        ("schedule", "past", 35, "IndexError: list index out of range; it is called as f(step, steps)"),
        (
            "schedule",
            "negative",
            38,
            "it returned -0.5 for step 1 of 3; it is called as f(step, steps), and must return a factor",
        ),
    ],
)
def test_an_unusable_function_is_refused_in_one_line(
    option: str, function: str, line: object, says: str, module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    error = refused(capfd, tmp_path, f"--{option}", f"{module}:{function}")
    where = f"{tmp_path}/{module}.py{line and f':{line}: '}"
    assert error.startswith(f"train: error: --{option} {module}:{function}: {where}")
    assert says in error


@pytest.mark.parametrize(
    ("code", "says"),
    [("def f(:\n  pass", ":1: SyntaxError: "), ("import os\nundefined", ":2: NameError: name 'undefined' is not")],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_line(
    code: str, says: str, module: str, tmp_path: Path
) -> None:
    (tmp_path / f"{module}.py").write_text(code)
    with pytest.raises(TrainError) as found:
        parse(["--data", "x", "--loss", f"{module}:f"])
    assert f"{tmp_path}/{module}.py{says}" in str(found.value)


def test_what_is_neither_a_choice_nor_a_function_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert f"--loss: invalid choice: 'focal' (choose from ce, bce, {OWN})" in refused(
        capfd, tmp_path, "--loss", "focal"
    )
    error = refused(capfd, tmp_path, "--loss", "no.such:focal")
    assert "--loss no.such:focal: cannot import no.such (No module named 'no')" in error
    assert f"{{ce,bce,{OWN}}}" in help_text(capfd)


def help_text(capfd: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        parse(["--help"])
    return capfd.readouterr().out


def test_a_function_of_ones_own_has_the_weights_and_mixes_of_ours(module: str) -> None:
    config = Config(data="", loss=f"{module}:ce")
    logits, labels, mix = torch.randn(4, 6), torch.tensor([0, 5, 2, 2]), Mix(0.7, None)
    ours, theirs = losses(make_loss(config), logits, labels, mix), losses(cross_entropy, logits, labels, mix)
    assert torch.equal(ours, theirs)
    assert own("loss", f"{module}:ce") is own("loss", config.loss)


def test_a_schedule_of_ones_own_is_a_factor_of_the_scaled_rate(module: str) -> None:
    config = Config(data="", lr=0.2, schedule=f"{module}:half")
    rate = make_schedule(config, 512, 10)
    assert [rate(0), rate(5), rate(9), rate(20)] == pytest.approx([0.4, 0.3, 0.22, 0.22])


def test_a_run_with_ones_own_loss_equals_that_with_the_same_of_ours(module: str, tmp_path: Path) -> None:
    """On two ranks, whose last batches are of unequal size."""
    options = [*QUICK.split(), "--data", "synthetic:13", "--mixup", "0.4", "--print-digest"]
    mine = run(tmp_path / "own", 2, *options, "--loss", f"{module}:ce")
    ours = run(tmp_path / "ours", 2, *options)
    assert mine[0].digest == ours[0].digest
