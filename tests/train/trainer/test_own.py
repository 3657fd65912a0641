"""The user's own functions in place of an option's choices."""

import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.train.runs import OLD, run
from train.__main__ import main
from train.arguments import OWN
from train.combinations import check
from train.config import Config, parse
from train.data.batch import Request, Transfer
from train.data.decode import Pillow
from train.data.loader import Loader
from train.data.open import open_dataset
from train.errors import TrainError
from train.loss import Mix, cross_entropy, losses, make_loss
from train.optim import load_state, make_optimizer, set_rate
from train.own import own
from train.schedule import make_schedule

QUICK = "--arch smallcnn --image-size 8 --epochs 1 --batch-size 4 --workers 1 --threads 1 --device cpu"
MODULE = """
import numpy as np
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


def spots(image, seed):
    image[np.random.default_rng(seed).integers(0, len(image), 2)] = 255
    return image


def chance(image, seed):
    return np.random.permutation(image)


def pale(image, seed):
    return image / 2


def small(image, seed):
    return image[1:]


def fails(image, seed):
    return image[999]


def adamw(groups, lr):
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999))


def head(groups, lr):
    found = []
    for group in groups:
        for name, parameter in zip(group["names"], group["params"]):
            found.append({"params": [parameter], "lr": 10 * lr if name.startswith("fc") else lr, "weight_decay": 0.1})
    return torch.optim.AdamW(found, lr=lr)


def part(groups, lr):
    return torch.optim.SGD(groups[:1], lr=lr)


def closure(groups, lr):
    return torch.optim.LBFGS([p for group in groups for p in group["params"]], lr=lr)


def nothing(groups, lr):
    return groups


def misspelt(groups, lr):
    return torch.optim.AdamX(groups)
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
        ("loss", "one", 11, "too many positional arguments; it is called as f(logits, labels)"),
        ("loss", "mean", 15, "it returned shape () for logits of shape (3, 9); it is called as f(logits, labels)"),
        (
            "loss",
            "text",
            19,
            "it returned a str; it is called as f(logits, labels), and must return a tensor of shape (n,)",
        ),
        ("loss", "hits", 23, "it returned values without a gradient"),
        ("loss", "wrong", 28, "ValueError: Expected input batch_size (3) to match target batch_size (2)"),
        ("schedule", "past", 36, "IndexError: list index out of range; it is called as f(step, steps)"),
        (
            "schedule",
            "negative",
            39,
            "it returned -0.5 for step 1 of 3; it is called as f(step, steps), and must return a factor",
        ),
        (
            "optimizer",
            "part",
            79,
            "it returned a SGD of ",
        ),
        (
            "optimizer",
            "closure",
            83,
            "it returned a LBFGS, whose step() needs a closure; it is called as f(groups, lr)",
        ),
        ("optimizer", "nothing", 87, "it returned a list"),
        ("optimizer", "misspelt", 92, "AttributeError: module 'torch.optim' has no attribute 'AdamX'"),
        ("augment", "chance", 51, "it returned another image for the same one and the same seed"),
        ("augment", "pale", 55, "it returned a ndarray of float64, shape (8, 8, 3) for an image of shape (8, 8, 3)"),
        ("augment", "small", 59, "it returned a ndarray of uint8, shape (7, 8, 3) for an image"),
        ("augment", "fails", 64, "IndexError: index 999 is out of bounds for axis 0 with size 8; it is called as f("),
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


def test_help_ends_with_the_options_of_dual_batch(capfd: pytest.CaptureFixture[str]) -> None:
    groups = re.findall(r"^([a-z ]+):$", help_text(capfd), re.MULTILINE)
    assert (groups[0], groups[-2:]) == ("options", ["output", "dual batch"])


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


def test_an_augmentation_of_ones_own_changes_each_image_by_its_seed(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After crop and flip, on any number of threads; its cost is said."""

    def images(config: Config) -> np.ndarray:
        source = open_dataset("synthetic:9", 12).train
        loader = Loader(config, source, Pillow(), 9, 1, Transfer(torch.device("cpu")))
        (batch,) = loader.batches([Request(np.arange(9), 9)], 0)
        loader.close()
        return batch.images.numpy().copy()

    config = Config(data="", image_size=8, workers=1)
    ours, mine = images(config), images(replace(config, augment=f"{module}:spots"))
    white = (mine == 255).all((2, 3))
    assert set(white.sum(1)) <= {1, 2}
    assert len(np.unique(white, axis=0)) > 1
    assert np.array_equal(mine[~white], ours[~white])
    assert np.array_equal(mine, images(replace(config, augment=f"{module}:spots", workers=3)))
    options = [*QUICK.split(), "--data", "synthetic:9", "--output", str(tmp_path / "out")]
    assert main([*options, "--augment", f"{module}:spots"]) == 0
    cost = r"train: --augment \w+:spots: [\d.e-]+ ms of Python an image: at most [\d,]+ images/s a process"
    assert re.search(cost, capfd.readouterr().out)


@pytest.mark.parametrize("option", ["loss", "augment", "optimizer"])
def test_dual_batch_takes_no_function(
    option: str, module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    function = {"loss": "ce", "augment": "spots", "optimizer": "adamw"}[option]
    dual = ["--parallel", "dual_batch", "--schedule", "multistep", f"--{option}", f"{module}:{function}"]
    assert f"--parallel dual_batch does not support --{option} {module}:{function}; remove" in refused(
        capfd, tmp_path, *dual
    )


def test_a_group_of_ones_own_has_its_rate_at_every_step(module: str) -> None:
    config = Config(data="", lr=0.2, optimizer=f"{module}:head")
    model = nn.Sequential(OrderedDict(body=nn.Linear(2, 3), fc=nn.Linear(3, 2)))
    optimizer = make_optimizer(config, model)
    set_rate(optimizer, 0.05)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.5, 0.05, 0.5])


def test_other_groups_than_the_checkpoints_are_refused(module: str) -> None:
    model = nn.Linear(2, 3)
    ours, mine = (make_optimizer(Config(data="", optimizer=f"{module}:{name}"), model) for name in ("adamw", "head"))
    load_state(ours, ours.state_dict())
    both = {**ours.state_dict(), "param_groups": [{"params": [0, 1]}]}
    with pytest.raises(TrainError, match="the checkpoint was saved with other parameter groups"):
        load_state(mine, both)


def test_a_run_with_ones_own_optimiser_equals_that_with_the_same_of_ours(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoints are forecast after the first step, with the same size."""
    options = [*QUICK.split(), "--data", "synthetic:12", "--lr", "0.01", "--print-digest"]
    texts = []
    for name in ("adamw", f"{module}:adamw"):
        assert main([*options, "--optimizer", name, "--output", str(tmp_path / name[-5:] / str(len(texts)))]) == 0
        texts.append(capfd.readouterr().out)
    ours, mine = texts
    digest = r"rank 0 weights (\w+)"
    assert re.findall(digest, ours) == re.findall(digest, mine)
    size = r"checkpoints of this run: about (.*?) \("
    assert re.findall(size, ours) == re.findall(size, mine)


@pytest.mark.skipif(OLD, reason="torch before 2.6")
def test_with_shards_only_what_is_named_elementwise(module: str) -> None:
    config = Config(data="", optimizer=f"{module}:adamw", parallel="fsdp")
    with pytest.raises(
        TrainError, match=r"with --optimizer .*:adamw: each rank .*write adamw.elementwise = True below"
    ):
        check(config, "fsdp", "none", [2, 2], "cpu")
    own("optimizer", config.optimizer).elementwise = True  # type: ignore[attr-defined]
    check(config, "fsdp", "none", [2, 2], "cpu")
