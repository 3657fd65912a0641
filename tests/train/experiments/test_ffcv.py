"""ffcv's recipe for ImageNet: anti-aliased strides (BlurPool) and validation of an image with its mirror image."""

from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.runs import digit_tree
from train.__main__ import main
from train.config import Config
from train.distributed.ddp import _needed_in_training
from train.errors import TrainError
from train.evaluate import Mirrored
from train.models import BlurredConv, configured_model
from train.weights import read_weights


def blurred(arch: str, classes: int = 10) -> nn.Module:
    return configured_model(Config(data="", arch=arch, blurpool=True), classes)


def test_the_input_of_a_stride_is_blurred_channel_by_channel() -> None:
    torch.manual_seed(0)
    x, conv = torch.randn(2, 16, 9, 9), nn.Conv2d(16, 4, 3, 2, 1)
    kernel = [[1, 2, 1], [2, 4, 2], [1, 2, 1]]
    smooth, padded = torch.zeros_like(x), nn.functional.pad(x, (1, 1, 1, 1))
    for row, column in product(range(3), range(3)):
        smooth += padded[:, :, row : row + 9, column : column + 9] * kernel[row][column] / 16
    torch.testing.assert_close(BlurredConv(conv)(x), conv(smooth))


def test_the_convolutions_that_ffcv_blurs_with_its_names() -> None:
    """Those with a stride and 16 channels or more, so not the first one, of 3 channels."""
    model = blurred("resnet50", 1000)
    found = [name for name, part in model.named_modules() if isinstance(part, BlurredConv)]
    assert found == [f"layer{stage}.0.{part}" for stage in (2, 3, 4) for part in ("conv2", "downsample.0")]
    names = {
        "layer2.0.conv2.blur_filter",
        "layer2.0.conv2.conv.weight",
        "layer2.0.downsample.0.conv.weight",
        "conv1.weight",
    }
    assert names <= model.state_dict().keys()
    assert "layer2.0.conv2.weight" not in model.state_dict()
    assert not _needed_in_training(model)  # constant filters are not sent in every step
    with pytest.raises(TrainError, match="--blurpool: --arch smallcnn has no strided convolution"):
        blurred("smallcnn")


def test_published_weights_are_loaded(tmp_path: Path) -> None:
    """They are the state dict of DistributedDataParallel."""
    torch.manual_seed(1)
    theirs = {name: torch.rand_like(value.float()) for name, value in blurred("resnet18", 7).state_dict().items()}
    torch.save({f"module.{name}": value for name, value in theirs.items()}, tmp_path / "final_weights.pt")
    model = blurred("resnet18", 5)
    assert read_weights(tmp_path / "final_weights.pt").load(model, other_classes=True) == ["fc.weight", "fc.bias"]
    assert torch.equal(model.state_dict()["layer4.0.conv1.conv.weight"], theirs["layer4.0.conv1.conv.weight"])
    with pytest.raises(TrainError, match="does not match"):
        read_weights(tmp_path / "final_weights.pt").load(configured_model(Config(data="", arch="resnet18"), 7), False)


def test_the_logits_are_the_mean_of_both_images() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    x = torch.randn(3, 3, 4, 4)
    expected = (model(x) + model(x.flip(-1))) / 2
    torch.testing.assert_close(Mirrored(model)(x), expected)
    assert not torch.allclose(model(x), expected)
    half = Mirrored(model.bfloat16())(x.bfloat16())
    assert half.dtype == torch.float32


@pytest.mark.slow
def test_the_recipe_trains_validates_and_exports(tmp_path: Path) -> None:
    """And --val-flip validates an image like its mirror image."""
    data = digit_tree(tmp_path / "data", 40, 20)
    options = "--arch cifar_resnet20 --blurpool --image-size 16 --epochs 2 --batch-size 8 --workers 1 --threads 1"
    common = ["--data", str(data), *options.split(), "--device", "cpu", "--print-digest"]
    assert main([*common, "--val-flip", "--output", str(tmp_path / "out")]) == 0
    file = tmp_path / "out" / "checkpoints" / "last.pt"
    for kind in ("pt2", "onnx"):
        assert main(["export", str(file), str(tmp_path / f"model.{kind}")]) == 0
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    model = blurred("cifar_resnet20").eval()
    model.load_state_dict(saved["model"])
    images = torch.rand(3, 3, 16, 16)
    mean, std = (torch.tensor(saved["config"][name]).view(3, 1, 1) for name in ("mean", "std"))
    expected = model((images - mean) / std).detach()
    exported = torch.export.load(tmp_path / "model.pt2").module()(images)
    session = import_module("onnxruntime").InferenceSession(tmp_path / "model.onnx")
    for found in (exported, torch.tensor(session.run(None, {"images": images.numpy()})[0])):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_the_blur_is_that_of_timm() -> None:
    layers: Any = import_module("timm.layers")
    x = torch.randn(2, 16, 9, 9)
    theirs = layers.BlurPool2d(16, filt_size=3, stride=1, pad_mode="constant")
    identity = nn.Conv2d(16, 16, 1, bias=False)
    nn.init.dirac_(identity.weight)
    torch.testing.assert_close(BlurredConv(identity)(x), theirs(x))
