"""Read weights for --pretrained, --evaluate and export: of this trainer, torchvision or timm, or as safetensors."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch import Tensor, nn

from train import checkpoint
from train.checkpoint import short
from train.errors import TrainError
from train.files import check_regular
from train.models import last_layer

# torchvision's auxiliary heads, which this trainer omits, and DenseNet's layer names in older files
AUXILIARY = re.compile(r"(AuxLogits|aux1|aux2)\.")
OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")
WRAPPERS = re.compile(r"(module\.|_orig_mod\.)+")  # added by DDP, AveragedModel and torch.compile
KEYS = ("state_dict_ema", "model_ema", "state_dict", "model")  # keys of timm's and torchvision's train.py, best first
# types that these scripts write in `args`; torch.load accepts only tensors, plain values and these
HARMLESS: list[Any] = [argparse.Namespace, PosixPath]
# layer names specific to timm: ViT, Swin and ConvNeXt, EfficientNet and MobileNet, RegNet, VGG
OF_TIMM = re.compile(r"patch_embed\.|stages\.\d|layers\.\d+\.blocks|conv_stem\.|s\d\.b\d|pre_logits\.fc")


@dataclass(frozen=True)
class Weights:
    """Weights of a file by name; `state`: the complete checkpoint if it is one of this trainer.

    `arch`, `classes`: those of the file; empty if it does not name them.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    state: checkpoint.State | None
    arch: str = ""
    classes: tuple[str, ...] = ()

    def load(self, model: nn.Module, other_classes: bool) -> list[str]:
        """Copy the weights to `model`; return the names of parameters that keep their initial values.

        With `other_classes`, these are the last layer's if the file has another number of classes; else none.

        Raises:
            TrainError: the weights are of another architecture.
        """
        own = model.state_dict()
        fresh = [name for name in last_layer(model) if other_classes and self._differs(name, own[name])]
        given = {name: value for name, value in self.tensors.items() if name not in fresh}
        wrong = [name for name in own if name not in fresh and self._differs(name, own[name])]
        unknown = [name for name in given if name not in own]
        if wrong or unknown:
            raise TrainError(
                f"{self.path} does not match --arch: {self._misfit(own, wrong, unknown)}; "
                f"use {self._right_arch()}" + ("" if other_classes else " and the classes of the file")
            )
        model.load_state_dict(given, strict=False)
        return fresh

    def _misfit(self, own: Mapping[str, Tensor], wrong: list[str], unknown: list[str]) -> str:
        """Describe the differences between file and model, with the first tensor of each kind."""
        missing = [name for name in wrong if name not in self.tensors]
        texts = [f"it lacks {len(missing)} of the model's {len(own)} tensors (first {missing[0]})"] if missing else []
        if unknown:
            texts.append(f"{len(unknown)} of its {len(self.tensors)} are unknown to the model (first {unknown[0]})")
        if shaped := [name for name in wrong if name in self.tensors]:
            theirs, mine = (tuple(tensors[shaped[0]].shape) for tensors in (self.tensors, own))
            texts.append(
                f"{len(shaped)} have other shapes (first {shaped[0]}: {theirs} in the file, {mine} in the model)"
            )
        return ", ".join(texts)

    def _right_arch(self) -> str:
        if self.arch:
            return f"--arch {self.arch}"
        timm = any(OF_TIMM.match(name) for name in self.tensors)
        return "--arch timm:NAME, because its layers have timm's names" if timm else "the architecture of the file"

    def _differs(self, name: str, own: Tensor) -> bool:
        if name.endswith("num_batches_tracked"):  # a counter, missing in old files
            return False
        return name not in self.tensors or self.tensors[name].shape != own.shape


def read_weights(path: Path) -> Weights:
    """Read the weights in a file; from a checkpoint of this trainer the EMA weights, if there are any.

    Raises:
        TrainError: the file is missing or damaged, or has no weights.
    """
    if path.suffix == ".safetensors":
        tensors, about = _load_safetensors(path)
        return Weights(path, _named(tensors), None, about.get("arch", ""), _classes(about.get("classes", "")))
    content = _load(path)
    if isinstance(content, dict) and "sha256" in content:
        state = checkpoint.read(path)
        return Weights(path, state.get("ema") or state["model"], state, state["arch"], tuple(state["classes"]))
    arch = _arch(content) if isinstance(content, dict) else ""
    for key in KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise TrainError(f"{path}: not a state dict")
    return Weights(path, _named(content), None, arch)


def _named(content: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by the model's own names, without those that this trainer's models lack."""
    averaged = {
        name: value for name, value in content.items() if name != "n_averaged"
    }  # a counter of torch's AveragedModel
    named = {OLD_DENSENET.sub(r"\1\2.", WRAPPERS.sub("", name, 1)): value for name, value in averaged.items()}
    return {name: value for name, value in named.items() if not AUXILIARY.match(name)}


def _check_readable(path: Path) -> None:
    try:
        check_regular(path)
    except FileNotFoundError:
        raise TrainError(f"{path}: no such file on this machine") from None
    except OSError as error:
        raise TrainError(f"{path}: cannot be read: {error.strerror or error}") from error


def _load(path: Path) -> Any:
    torch.serialization.add_safe_globals(HARMLESS)
    _check_readable(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged zip or pickle can raise any exception
        if unsafe := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            raise TrainError(
                f"{path}: contains a {unsafe[1]}, which may run code when loaded; if you trust the file, save "
                f"only its state dict to another file"
            ) from error
        raise TrainError(f"{path}: not a file of weights ({type(error).__name__})") from error


def _load_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file."""
    _check_readable(path)
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise TrainError(
            f"{path} needs safetensors: pip install safetensors, or add safetensors to the job's image.packages"
        ) from None
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()  # a method of a file, which cannot be iterated
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except SafetensorError as error:
        raise TrainError(f"{path}: not a file of weights ({error})") from error


def _classes(text: str) -> tuple[str, ...]:
    """Return the classes in the metadata of `write_safetensors`; another program's may mean something else."""
    try:
        found = json.loads(text)
    except ValueError:
        return ()
    return tuple(map(str, found)) if isinstance(found, list) else ()


def write_safetensors(weights: Weights, file: Path) -> None:
    """Write the weights with the names of the state dict; the metadata has arch and classes (JSON).

    Raises:
        TrainError: the file could not be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # its tensors are contiguous, and none is another's memory
    tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.tensors.items()}
    about = {"format": "pt", "arch": weights.arch, "classes": json.dumps(weights.classes)}
    try:
        save_file(tensors, file, about)
    except SafetensorError as error:
        raise TrainError(f"{file} could not be written: {error}") from error


def _arch(content: dict[str, Any]) -> str:
    """Return the architecture recorded by timm's train.py (`arch`, `args`) or torchvision's (`args.model`), else ""."""
    args, arch = content.get("args"), content.get("arch")
    if isinstance(arch, str):
        return f"timm:{arch}" if isinstance(args, argparse.Namespace) else arch
    name = getattr(args, "model", "")
    return name if isinstance(name, str) else ""


def load_initial(
    file: str, model: nn.Module, classes: Sequence[str], evaluating: bool, say: Callable[[str], None]
) -> None:
    """Load the weights of --evaluate (`evaluating`) or --pretrained.

    Raises:
        TrainError: see `read_weights` and `Weights.load`; or --evaluate has other classes than the data.
    """
    weights, here = read_weights(Path(file).expanduser()), list(classes)
    if evaluating and weights.classes and (saved := list(weights.classes)) != here:
        raise TrainError(f"--evaluate {file} has classes {short(saved)}, but the data has {short(here)}")
    fresh = weights.load(model, other_classes=not evaluating)
    say(f"train: loaded weights from {file}" + (f"; initialised: {', '.join(fresh)}" if fresh else ""))
