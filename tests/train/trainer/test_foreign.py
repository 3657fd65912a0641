"""External models: a function in the user's code, and (slow) timm's."""

import copy
import importlib
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.train.runs import ROOT, digit_tree, finish, run, start
from train.__main__ import main
from train.config import Config, parse
from train.errors import TrainError
from train.foreign import about_model
from train.hardware import ideal_seconds
from train.models import make_model
from train.precision import choose_precision
from train.weights import read_weights

QUICK = "--epochs 1 --batch-size 8 --workers 1 --threads 1 --device cpu"
MODULE = """
from torch import nn


class Net(nn.Module):
    default_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25), "input_size": (3, 16, 16), "crop_pct": 0.8}

    def __init__(self, num_classes, width):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.stem(x).mean((2, 3)))


def build(num_classes, width=8):
    return Net(num_classes, width)


def pair(num_classes):
    return nn.Sequential(Net(num_classes, 8), nn.Linear(num_classes, 2))


def text(num_classes):
    return "no model"


class Judging(Net):
    def forward(self, x):
        self.stem[1].num_batches_tracked += 1  # changes also in evaluation
        return super().forward(x if x.mean() > 0 else -x)


def judging(num_classes):
    return Judging(num_classes, 8)


class Kernel(Net):
    def forward(self, x):
        if not x.data_ptr():  # as a kernel of Triton
            raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
        return super().forward(x)


def kernel(num_classes):
    return Kernel(num_classes, 8)


def judging_two(num_classes):
    return Judging(2, 8)


calls = []


def counted(num_classes):
    calls.append(num_classes)
    if num_classes != 9:
        raise ValueError(f"there are 9 classes, not {num_classes}")
    return Net(num_classes, 8)


def unused(num_classes):
    model = Net(num_classes, 8)
    model.second_head = nn.Linear(8, num_classes)
    return model


def lazy(num_classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes))


number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a user module, different in every test because modules are imported once."""
    name = f"nets_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_the_model_sets_the_default_image_options(module: str) -> None:
    about = about_model(make_model(f"{module}:build", 5))
    config = parse(["--data", "x", "--arch", f"{module}:build"]).settled(about)
    assert (config.mean, config.std) == ((0.5,) * 3, (0.25,) * 3)
    assert (config.image_size, config.val_resize) == (16, 20)
    options = ["--data", "x", "--arch", f"{module}:build", "--image-size", "32", "--mean", "0", "0", "0"]
    config = parse(options).settled(about)
    assert (config.mean, config.std) == ((0.0,) * 3, (0.25,) * 3)
    assert (config.image_size, config.val_resize) == (32, 40)


@pytest.mark.parametrize(
    ("arch", "says"),
    [
        ("no.such.module:build", "cannot import no.such.module (No module named 'no')"),
        ("{}:built", "has no function built"),
        ("{}:number", "has no function number"),
        ("{}:text", "the function returns a str, not a torch.nn.Module"),
        ("{}:build --model-kwargs depth=3", "the function cannot be called with num_classes, depth"),
        ("{}:pair --data synthetic:9", "returns torch.Size([2, 2]) for two images, not logits of shape (2, 9)"),
        ("{}:judging_two --data synthetic:9", "returns torch.Size([2, 2]) for two images, not logits of shape (2, 9)"),
        ("{}:lazy", "1.weight has no shape before the first forward pass"),
        ("timm:no_such_net", "timm"),  # it has none of that name, or is not installed
    ],
)
def test_an_unusable_model_is_refused_in_one_line(
    arch: str, says: str, module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", "synthetic:9", "--output", str(tmp_path / "out"), *QUICK.split(), "--arch"]
    assert main([*options, *arch.format(module).split()]) == 2
    (error,) = capfd.readouterr().err.splitlines()
    assert error.startswith("train: error: --arch ")
    assert says in error


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_users_function_is_called_once_with_the_classes_of_the_data(ranks: int, module: str, tmp_path: Path) -> None:
    options = ["--data", "synthetic:9", *QUICK.split(), "--batch-size", 4, "--arch", f"{module}:counted"]
    listing = f"import {module}\nfrom train.__main__ import main\nprint(main(), {module}.calls)"
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    found = run(tmp_path / "out", ranks, *options, program=("-c", listing), env=path)
    assert [rank.lines[-1] for rank in found] == ["0 [9]"] * ranks
    config = found[0].checkpoint()["config"]
    assert (config["image_size"], config["val_resize"], config["mean"]) == (16, 20, (0.5, 0.5, 0.5))


@pytest.mark.parametrize("amp", ["none", "bf16", "O2"])
@pytest.mark.parametrize("arch", ["judging", "kernel"])
def test_a_model_that_needs_values_is_checked_on_the_device(
    arch: str, amp: str, module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--data", "synthetic:9", "--output", str(tmp_path / "out"), *QUICK.split(), "--amp", amp]
    assert main([*options, "--arch", f"{module}:{arch}"]) == 0
    assert "warning" not in capfd.readouterr().out


@pytest.mark.parametrize("arch", ["judging", "kernel"])
def test_a_model_whose_operations_cannot_be_counted_has_no_mfu(arch: str, module: str) -> None:
    model = make_model(f"{module}:{arch}", 9)
    assert ideal_seconds(model, 16, "NVIDIA H100 80GB HBM3", "bf16", True) is None
    assert ideal_seconds(make_model(f"{module}:build", 9), 16, "NVIDIA H100 80GB HBM3", "bf16", True)


def test_a_check_on_the_device_leaves_buffers_alone(module: str) -> None:
    config = Config(data="", amp="O2")
    model = make_model(f"{module}:judging", 9)
    before = copy.deepcopy(model.state_dict())
    choose_precision(config, torch.device("cpu")).trial(model, torch.zeros(2, 3, 16, 16), torch.device("cpu"))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
        assert value.dtype == before[name].dtype


def test_what_shapes_alone_do_not_show_is_a_warning(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = digit_tree(tmp_path / "data", 24, 12)
    options = ["--data", str(data), "--output", str(tmp_path), *QUICK.split(), "--arch", f"{module}:unused"]
    assert main(options) == 0
    says = "no gradient for second_head.weight, second_head.bias: the forward pass does not use it"
    assert f"train: warning: --arch {module}:unused: {says}" in capfd.readouterr().out


def test_ddp_names_a_parameter_without_a_gradient_before_the_first_step(module: str, tmp_path: Path) -> None:
    """In the second step it would end with advice about an argument that the user cannot set."""
    options = ["--data", "synthetic:9", *QUICK.split(), "--batch-size", 2, "--arch", f"{module}:unused"]
    ranks = start(tmp_path / "out", 2, *options)
    assert finish(ranks) == [2, 2], ranks[0].text
    (error,) = [line for rank in ranks for line in rank.lines if "error" in line]
    assert "no gradient for second_head.weight, second_head.bias, which its forward pass does not use" in error


def whole(arch: str, tmp_path: Path, *options: str) -> torch.nn.Module:
    """Train, resume, export, and start again from the weights; return the trained model."""
    data, output = digit_tree(tmp_path / "data", 24, 12), tmp_path / "out"
    common = ["--data", str(data), "--arch", arch, *QUICK.split(), *options]
    once = [*common, "--epochs", "2", "--output", str(tmp_path / "once")]
    assert main(once) == 0
    assert main([*common, "--schedule", "linear", "--epochs", "2", "--output", str(output)]) == 0
    assert main([*common, "--schedule", "linear", "--epochs", "3", "--output", str(output)]) == 0
    saved: dict[str, Any] = torch.load(output / "checkpoints" / "last.pt", weights_only=True)
    assert saved["progress"]["validated"] == 3
    assert main(["export", str(output / "checkpoints" / "last.pt"), str(tmp_path / "model.pt2")]) == 0
    config = saved["config"]
    images = torch.rand(3, 3, config["image_size"], config["image_size"])
    mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("mean", "std"))
    model = make_model(arch, 10).eval()
    model.load_state_dict(saved["model"])
    exported = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.allclose(exported(images), model((images - mean) / std), atol=1e-4)
    weights = ["--pretrained", str(output / "checkpoints" / "last.pt"), "--output", str(tmp_path / "more")]
    assert main([*common, *weights]) == 0
    return model


def test_a_function_in_the_users_code_is_trained_resumed_and_exported(module: str, tmp_path: Path) -> None:
    whole(f"{module}:build", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "test_efficientnet", "test_resnet"])
def test_a_model_of_timm_is_trained_resumed_and_exported(name: str, tmp_path: Path) -> None:
    timm = importlib.import_module("timm")
    recommended = timm.get_pretrained_cfg(name)
    config = parse(["--data", "x", "--arch", f"timm:{name}"])
    assert (config.mean, config.std) == (recommended.mean, recommended.std)
    assert config.image_size == recommended.input_size[-1]
    theirs = timm.create_model(name, num_classes=10).eval()
    theirs.load_state_dict(whole(f"timm:{name}", tmp_path).state_dict())
    optimizer, args = torch.optim.SGD(theirs.parameters(), 0.1), Namespace(model=name)  # as timm's train.py saves it
    timm.utils.CheckpointSaver(theirs, optimizer, args, checkpoint_dir=str(tmp_path)).save_checkpoint(0, 1.0)
    data = ["--data", str(tmp_path / "data"), "--output", str(tmp_path / "there"), *QUICK.split()]
    assert main([*data, "--arch", f"timm:{name}", "--evaluate", str(tmp_path / "last.pth.tar")]) == 0
    if torch.__version__ < "2.5":
        return
    runtime = importlib.import_module("onnxruntime")
    assert main(["export", str(tmp_path / "out" / "checkpoints" / "last.pt"), str(tmp_path / "model.onnx")]) == 0
    images = torch.rand(3, 3, config.image_size, config.image_size)
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (config.mean, config.std))
    (logits,) = runtime.InferenceSession(tmp_path / "model.onnx").run(None, {"images": images.numpy()})
    assert np.abs(logits - theirs((images - mean) / std).detach().numpy()).max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("vit_tiny_patch16_224", "convnext_atto", "efficientnet_b0", "mobilenetv3_small_100", "regnety_002", "vgg11"),
        *("swin_tiny_patch4_window7_224", "deit_tiny_distilled_patch16_224"),
    ],
)
def test_only_the_classifier_of_a_model_of_timm_is_new_for_other_classes(name: str, tmp_path: Path) -> None:
    timm = importlib.import_module("timm")
    theirs = timm.create_model(name, num_classes=7).state_dict()
    torch.save(theirs, tmp_path / "timm.pth")
    model = make_model(f"timm:{name}", 5)
    fresh = read_weights(tmp_path / "timm.pth").load(model, other_classes=True)
    assert {value.shape[0] for key, value in theirs.items() if key in fresh} == {7}
    assert all(torch.equal(value, theirs[key]) for key, value in model.state_dict().items() if key not in fresh)
    with pytest.raises(TrainError, match="--arch timm:NAME, because its layers have timm's names"):
        read_weights(tmp_path / "timm.pth").load(make_model("smallcnn", 7), other_classes=True)


def test_a_missing_timm_is_reported_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(TrainError, match="run: pip install timm, or add timm to the job's image"):
        parse(["--data", "x", "--arch", "timm:resnet50"])
