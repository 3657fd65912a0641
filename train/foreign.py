"""External models: --arch timm:NAME, and --arch package.module:function for a function in the user's code."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from train.errors import TrainError
from train.own import imported

if TYPE_CHECKING:
    from torch import nn

Build = Callable[..., "nn.Module"]


def is_foreign(arch: str) -> bool:
    return ":" in arch


def is_timm(arch: str) -> bool:
    return arch.startswith("timm:")


def builder(arch: str) -> Build:
    """Return a function of `num_classes` and --model-kwargs that builds a model from images (n, 3, H, W) to logits.

    Raises:
        TrainError: the model or function does not exist.
    """
    where, _, name = arch.partition(":")
    return _of_timm(name) if where == "timm" else _of_user(arch, name)


RECOMMENDED = ("mean", "std", "image_size", "val_resize")  # options that a model may set


def recommended(about: Mapping[str, Any], side: int | None) -> dict[str, Any]:
    """Return the values of RECOMMENDED in a mapping as in timm, with mean, std, input_size and crop_pct.

    `side`: the image size, if given.
    """
    result: dict[str, Any] = {name: tuple(map(float, about[name])) for name in ("mean", "std") if name in about}
    if side is None and "input_size" in about:
        side = result["image_size"] = int(about["input_size"][-1])
    if side and about.get("crop_pct"):
        result["val_resize"] = math.floor(side / about["crop_pct"])
    return result


def about_timm(arch: str) -> Mapping[str, Any]:
    """Return what timm knows about its model, without building it. Raises TrainError: see `builder`."""
    builder(arch)
    found = importlib.import_module("timm").get_pretrained_cfg(arch.partition(":")[2])
    return found.to_dict() if found else {}


def about_model(model: nn.Module) -> Mapping[str, Any]:
    """Return a model's `pretrained_cfg` or `default_cfg`; empty if it has none."""
    found: Mapping[str, Any] = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    return found


def _of_timm(name: str) -> Build:
    try:
        timm: Any = importlib.import_module("timm")
    except ImportError as error:
        raise TrainError(
            f"--arch timm:{name}: cannot import timm ({error}); run: pip install timm, or add timm to the job's "
            f"image.packages"
        ) from error
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.4)
        raise TrainError(f"--arch timm:{name}: timm {timm.__version__} has no such model; closest: {', '.join(near)}")
    try:
        timm.get_pretrained_cfg(name)
    except RuntimeError as error:
        raise TrainError(f"--arch timm:{name}: {error}") from error
    return lambda **options: timm.create_model(name, pretrained=False, **options)


def _of_user(arch: str, name: str) -> Build:
    module = imported("arch", arch)
    function = getattr(module, name, None)
    if not callable(function):
        raise TrainError(f"--arch {arch}: {module.__file__} has no function {name}")

    def build(**options: Any) -> nn.Module:
        try:
            inspect.signature(function).bind(**options)
        except TypeError as error:
            given = ", ".join(options)
            raise TrainError(f"--arch {arch}: the function cannot be called with {given}: {error}") from error
        model: Any = function(**options)
        if not hasattr(model, "state_dict"):
            raise TrainError(f"--arch {arch}: the function returns a {type(model).__name__}, not a torch.nn.Module")
        return model  # type: ignore[no-any-return]  # a torch module, checked without importing torch

    return build
