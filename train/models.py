"""Architectures by name: small models for 32x32 images, torchvision's classifiers, and external models (`foreign`)."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from train import drop_path, foreign
from train.blurpool import with_blurred_strides
from train.config import Config
from train.errors import TrainError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SmallCNN(nn.Module):
    """Three stages of two 3x3 convolutions with group norm; (N, 3, H, W) -> (N, classes), H and W >= 8.

    Without batch norm, an image's output depends only on that image, so the result does not depend on the ranks.
    """

    def __init__(self, num_classes: int, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        last = 3
        for index, width in enumerate(widths):
            stages += [nn.MaxPool2d(2)] if index else []
            for channels in (last, width):
                conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
                stages += [conv, nn.GroupNorm(8, width), nn.ReLU(inplace=True)]
            last = width
        self.features = nn.Sequential(*stages)
        self.classifier = nn.Linear(last, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).mean((2, 3)))
        return logits


OF_EXPERIMENTS = (
    "cifar_convnet",
    "cifar_mobilenet_v2",
    "cifar_mobilenet_v2_nobn",
    "cifar_resnet18",
    "cifar_resnet18_keras",
    "cifar_resnet20",
    "cifar_vgg16",
)  # functions of train.experiments.cifar_models
OWN = ("smallcnn", *OF_EXPERIMENTS)


def make_model(
    arch: str,
    num_classes: int,
    zero_init: bool = True,
    options: Mapping[str, Any] | None = None,
    depth_rate: float = drop_path.OWN,
) -> nn.Module:
    """Build the architecture `arch`, initialised from torch's global generator.

    `zero_init`: zero-initialise the residual branches of torchvision's ResNets. `options`: for the model's constructor.
    `depth_rate`: see `drop_path`.

    Raises:
        TrainError: unknown architecture (the message lists the closest names) or option.
    """
    name = drop_path.keyword(arch) if depth_rate != drop_path.OWN else None
    given: dict[str, Any] = {"num_classes": num_classes} | ({name: depth_rate} if name else {})
    if foreign.is_foreign(arch):
        return _built(foreign.builder(arch), arch, given, options)
    if arch in OWN:
        if depth_rate != drop_path.OWN:
            raise TrainError(f"--drop-path {depth_rate}: --arch {arch} has no stochastic depth")
        if options:
            raise TrainError(f"--model-kwargs {' '.join(options)}: --arch {arch} has no options")
        return _own(arch, num_classes)
    from torchvision import models  # imported here: it takes two seconds, and the architectures in OWN do not need it

    names: list[str] = models.list_models(module=models)
    if arch not in names:
        near = difflib.get_close_matches(arch, [*OWN, *names], n=3, cutoff=0.4)
        raise TrainError(f"--arch {arch}: no such architecture; closest: {', '.join(near or ['resnet50'])}")
    build = models.get_model_builder(arch)
    keywords = given | {"weights": None}
    if arch in ("googlenet", "inception_v3"):  # auxiliary heads return tuples; train only the main head
        keywords |= {"aux_logits": False, "init_weights": True}
    if arch.startswith(("resnet", "resnext", "wide_resnet")):  # for large batches: Goyal et al., section 5.1
        keywords["zero_init_residual"] = zero_init
    model = _built(build, arch, keywords, options)
    if depth_rate != drop_path.OWN and name is None:
        drop_path.set_rate(model, arch, depth_rate)
    return model


def _own(arch: str, num_classes: int) -> nn.Module:
    if arch not in OF_EXPERIMENTS:
        return SmallCNN(num_classes)
    built: nn.Module = getattr(importlib.import_module("train.experiments.cifar_models"), arch)(num_classes)
    return built


def _built(
    build: Callable[..., nn.Module], arch: str, keywords: dict[str, Any], options: Mapping[str, Any] | None
) -> nn.Module:
    try:
        return build(**keywords | dict(options or {}))
    except (TypeError, ValueError) as error:
        if "drop_path_rate" in str(error):
            raise TrainError(f"--drop-path: --arch {arch} has no stochastic depth: {error}") from error
        if not options:
            raise
        raise TrainError(f"--model-kwargs {' '.join(options)}: {arch} does not accept them: {error}") from error


def check_sides(model: nn.Module, arch: str, sides: Iterable[int], classes: int) -> str | None:
    """Check the model's output for these image sizes, by shapes only; return a warning where that is not possible.

    Raises:
        TrainError: the model does not return logits, or has layers that get their shapes in the first forward pass.
    """
    lazy = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if is_lazy(value)]
    if lazy:
        raise TrainError(
            f"--arch {arch}: {lazy[0]} has no shape before the first forward pass, so it has no initial weights to "
            f"share; give the layer its input size instead of using a lazy one"
        )
    state = _shapes(model)
    for side in sides:
        try:
            with torch.no_grad():
                found = functional_call(model.eval(), state, (_two_images(side),))
        except (RuntimeError, ValueError, AssertionError) as error:  # raised by layers of torch and torchvision
            why = next(iter(str(error).splitlines()), type(error).__name__)
            if "meta" in why.lower():  # the forward pass reads values, or creates tensors on a device of its own
                return f"train: warning: --arch {arch}: images of {side} px not checked before the first step: {why}"
            raise TrainError(
                f"--arch {arch} does not accept images of {side} px ({why}); change --image-size or --phases"
            ) from error
        finally:
            model.train()
        if (shape := getattr(found, "shape", type(found).__name__)) != (2, classes):
            raise TrainError(f"--arch {arch} returns {shape} for two images, not logits of shape (2, {classes})")
    return None


def without_gradient(model: nn.Module, side: int) -> list[str]:
    """Return the trainable parameters that a training step gives no gradient; [] if shapes do not suffice to tell."""
    state = _shapes(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    try:
        found: Tensor = functional_call(model, state, (_two_images(side),))
        gradients = torch.autograd.grad(found.sum(), [state[name] for name in trained], allow_unused=True)
    except (RuntimeError, ValueError, AssertionError, AttributeError):  # as in `check_sides`, or no tensor
        return []
    return [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]


def _shapes(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers without values."""
    return {name: value.to("meta") for name, value in (*model.named_parameters(), *model.named_buffers())}


def _two_images(side: int) -> Tensor:
    return torch.empty(2, 3, side, side, device="meta")


def last_layer(model: nn.Module) -> list[str]:
    """Return the classifier's parameters: as declared by a timm model, else the last linear or convolutional layer."""
    layers = [name for name, part in model.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)][-1:]
    if type(model).__module__.startswith("timm."):
        known: Any = model.get_classifier()  # type: ignore[operator]  # a method, which nn.Module's stub cannot know
        heads = known if isinstance(known, tuple) else (known,)
        layers = [name for name, part in model.named_modules() if any(part is head for head in heads)]
    return [name for name in model.state_dict() if name.rpartition(".")[0] in layers]


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model has batch norm layers, so that outputs depend on batch statistics."""
    return any(isinstance(module, BATCH_NORMS) for module in model.modules())


def has_own_sync_batch_norm(model: nn.Module) -> bool:
    """Whether the model has layers of `train.experiments.syncbn`, which is not imported if it has none."""
    return any(getattr(module, "over_ranks", False) for module in model.modules())


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def configured_model(config: Config, num_classes: int) -> nn.Module:
    """Build the model selected by the options, with the same weights on every rank."""
    torch.manual_seed(config.seed)
    options = config.model_options()
    model = make_model(config.arch, num_classes, config.zero_init_residual, options, config.drop_path)
    return with_blurred_strides(model, config.arch) if config.blurpool else model


def synchronised(model: nn.Module, config: Config) -> nn.Module:
    """Replace batch norm as --syncbn says."""
    if config.syncbn == "custom":
        from train.experiments.syncbn import convert

        return convert(model)
    if config.syncbn == "library":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch's
        return converted
    return model
