"""Weights from a file, for --pretrained, --evaluate and export: our checkpoints, torchvision's and timm's files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from train import checkpoint
from train.errors import TrainError

# torchvision's auxiliary heads, which this trainer leaves out, and the names of DenseNet's layers in its older files
AUXILIARY = re.compile(r"(AuxLogits|aux1|aux2)\.")
OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")


@dataclass(frozen=True)
class Weights:
    """A file's weights by name; `state` is the whole checkpoint if it is one of this trainer."""

    path: Path
    tensors: Mapping[str, Tensor]
    state: checkpoint.State | None

    def load(self, model: nn.Module, other_classes: bool) -> list[str]:
        """Copies the weights to `model`; returns the names of those that keep their initial values.

        With `other_classes` these are the last layer's, if the file has another number of classes; else none.

        Raises:
            TrainError: the file is of another architecture.
        """
        own = model.state_dict()
        fresh = [name for name in self._last_layer(model) if other_classes and self._differs(name, own[name])]
        given = {name: value for name, value in self.tensors.items() if name not in fresh}
        wrong = [name for name in own if name not in fresh and self._differs(name, own[name])]
        wrong += [f"{name} (unknown)" for name in given if name not in own]
        if wrong:
            raise TrainError(
                f"{self.path} does not fit --arch: {len(wrong)} of {len(own)} tensors differ, the first is "
                f"{wrong[0]}; use the architecture of the file" + ("" if other_classes else " and its classes")
            )
        model.load_state_dict(given, strict=False)
        return fresh

    def _differs(self, name: str, own: Tensor) -> bool:
        if name.endswith("num_batches_tracked"):  # only counts; old files lack it
            return False
        return name not in self.tensors or self.tensors[name].shape != own.shape

    def _last_layer(self, model: nn.Module) -> list[str]:
        layers = [name for name, part in model.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)]
        return [name for name in model.state_dict() if name.rpartition(".")[0] == layers[-1]]


def read_weights(path: Path) -> Weights:
    """The weights in a file; of our checkpoints the averaged ones, if there are any.

    Raises:
        TrainError: the file is missing or damaged, or has no weights.
    """
    if path.suffix == ".safetensors":
        raise TrainError(
            f"{path}: convert it first: python -c 'import torch, safetensors.torch as s; "
            f'torch.save(s.load_file("{path.name}"), "{path.stem}.pth")\''
        )
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise TrainError(f"{path}: no such file on this machine") from None
    except Exception as error:  # a damaged zip or pickle can raise any exception
        raise TrainError(f"{path}: no file of weights ({type(error).__name__})") from error
    if isinstance(content, dict) and "sha256" in content:
        state = checkpoint.read(path)
        return Weights(path, state.get("ema") or state["model"], state)
    for key in ("state_dict_ema", "model_ema", "state_dict", "model"):  # as timm's and torchvision's scripts save them
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise TrainError(f"{path}: no state dict")
    named = {OLD_DENSENET.sub(r"\1\2.", name.removeprefix("module.")): value for name, value in content.items()}
    return Weights(path, {name: value for name, value in named.items() if not AUXILIARY.match(name)}, None)
