"""Architectures by name: small models for 32x32 images, torchvision's classifiers, and external models (`foreign`)."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.parameter import is_lazy

from train import foreign
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


DEFAULT_RATE = -1.0  # of the architecture
IN_CONSTRUCTOR = ("convnext", "efficientnet")  # torchvision models; the others have a fixed rate


def make_model(
    arch: str,
    num_classes: int,
    zero_init: bool = True,
    options: Mapping[str, Any] | None = None,
    depth_rate: float = DEFAULT_RATE,
) -> nn.Module:
    """Build the architecture `arch`, initialised from torch's global generator.

    `zero_init`: zero-initialise the residual branches of torchvision's ResNets. `options`: for the model's constructor.
    `depth_rate`: the stochastic depth of the last block.

    Raises:
        TrainError: unknown architecture (the message lists the closest names) or option.
    """
    name = _rate_argument(arch) if depth_rate != DEFAULT_RATE else None
    given: dict[str, Any] = {"num_classes": num_classes} | ({name: depth_rate} if name else {})
    if foreign.is_foreign(arch):
        return _built(foreign.builder(arch), arch, given, options)
    if arch in OWN:
        if depth_rate != DEFAULT_RATE:
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
    if depth_rate != DEFAULT_RATE and name is None:
        _scale_rates(model, arch, depth_rate)
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


# Stochastic depth, also called drop path (Huang et al., arXiv 1603.09382): the rate grows linearly with the depth. The
# models implement it; random numbers come from torch's generator, as for dropout.


def _rate_argument(arch: str) -> str | None:
    """Return the name of the constructor's rate argument, or None."""
    if foreign.is_foreign(arch):
        return "drop_path_rate"
    return "stochastic_depth_prob" if arch.startswith(IN_CONSTRUCTOR) else None


def _scale_rates(model: nn.Module, arch: str, rate: float) -> None:
    """Scale the rates of a torchvision model so that the last block has `rate`.

    Raises:
        TrainError: the model has no stochastic depth.
    """
    from torchvision.ops import StochasticDepth  # imported here, as in `models`

    parts = [part for part in model.modules() if isinstance(part, StochasticDepth)]
    last = max((part.p for part in parts), default=0.0)
    if not last:
        raise TrainError(
            f"--drop-path {rate}: --arch {arch} has no stochastic depth; use torchvision's convnext*, efficientnet*, "
            f"swin* or maxvit*, or a timm model such as timm:resnet50"
        )
    for part in parts:
        part.p *= rate / last


MIN_CHANNELS = 16


class BlurredConv(nn.Module):
    """Applies `conv` to the blurred input: an anti-aliased strided convolution (Zhang, arXiv 1904.11486).

    As in ffcv's ImageNet example (https://github.com/libffcv/ffcv-imagenet, train_imagenet.py): before every
    convolution with a stride and at least 16 input channels, each channel is blurred by a 3x3 binomial filter. The
    state dict has ffcv's names.
    """

    blur_filter: Tensor

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("blur_filter", torch.outer(row, row).repeat(conv.in_channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Same shapes as `conv`."""
        blurred = functional.conv2d(x, self.blur_filter, padding=1, groups=self.conv.in_channels)
        out: Tensor = self.conv(blurred)
        return out


def with_blurred_strides(model: nn.Module, arch: str) -> nn.Module:
    """Replace strided convolutions of the model by `BlurredConv`; return the model.

    Raises:
        TrainError: the model has none.
    """
    strided = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Conv2d) and max(part.stride) > 1 and part.in_channels >= MIN_CHANNELS
    ]
    if not strided:
        raise TrainError(
            f"--blurpool: --arch {arch} has no strided convolution with {MIN_CHANNELS} or more input channels; "
            f"remove the option"
        )
    for name in strided:
        parent, _, own = name.rpartition(".")
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        setattr(model.get_submodule(parent), own, BlurredConv(conv))
    return model


def check_sides(
    model: nn.Module, arch: str, sides: Iterable[int], classes: int, on_device: Callable[[nn.Module, Tensor], Any]
) -> str | None:
    """Check the model's output for these image sizes: by shapes, or on the device if its forward pass needs values.

    `on_device`: computes the output of images, see `Precision.trial`. Return a warning if there was no memory for that.

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
            found = _output(model, state, side, on_device)
        except torch.cuda.OutOfMemoryError as error:
            return f"train: warning: --arch {arch}: images of {side} px not checked before the first step: {error}"
        except Exception as error:  # a user's model may raise any
            why = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise TrainError(
                f"--arch {arch} does not accept images of {side} px: {why}; if this is due to their size, change "
                f"--image-size or --phases"
            ) from error
        finally:
            model.train()
        if (shape := getattr(found, "shape", type(found).__name__)) != (2, classes):
            raise TrainError(f"--arch {arch} returns {shape} for two images, not logits of shape (2, {classes})")
    return None


@torch.no_grad()
def _output(
    model: nn.Module, state: dict[str, Tensor], side: int, on_device: Callable[[nn.Module, Tensor], Any]
) -> Any:
    try:
        return functional_call(model.eval(), state, (_two_images(side),))
    except Exception:  # noqa: BLE001 - it reads values or has kernels without shapes; if not, the device raises it too
        return on_device(model.eval(), torch.zeros(2, 3, side, side))


def without_gradient(model: nn.Module, side: int) -> list[str]:
    """Return the trainable parameters that a training step gives no gradient; [] if shapes do not suffice to tell."""
    state = _shapes(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    try:
        found: Tensor = functional_call(model, state, (_two_images(side),))
        gradients = torch.autograd.grad(found.sum(), [state[name] for name in trained], allow_unused=True)
    except Exception:  # noqa: BLE001 - as in `check_sides`
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


def elements(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of containers, at any depth: a model's blocks."""
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from elements(child)
        elif isinstance(module, nn.Sequential | nn.ModuleList):
            yield child
        else:
            yield from elements(child)  # a module with containers, such as a transformer's encoder


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model has batch norm layers, so that outputs depend on batch statistics."""
    return any(isinstance(module, BATCH_NORMS) for module in model.modules())


def has_own_sync_batch_norm(model: nn.Module) -> bool:
    """Whether the model has layers of `train.experiments.syncbn`, which is not imported if it has none."""
    return any(getattr(module, "over_ranks", False) for module in model.modules())


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the running statistics of batch norm by name."""
    return {name: value for name, value in model.named_buffers() if name.endswith(("running_mean", "running_var"))}


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def configured_model(config: Config, num_classes: int) -> nn.Module:
    """Build the model selected by the options, with the same weights on every rank."""
    torch.manual_seed(config.seed)
    options = config.model_options()
    model = make_model(config.arch, num_classes, config.zero_init_residual, options, config.drop_path)
    return with_blurred_strides(model, config.arch) if config.blurpool else model
