"""--freeze: parameters that are not trained, and the batch norm layers that are frozen with them."""

from __future__ import annotations

import re

from torch import Tensor, nn

from train.errors import TrainError
from train.models import parameter_count


def freeze(model: nn.Module, pattern: str) -> str:
    """Stop training the parameters in whose name the regular expression `pattern` is found; return a line to print.

    Raises:
        TrainError: it is found in no name, or in all.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = [name for name in trained if re.search(pattern, name)]
    if not 0 < len(found) < len(trained):
        what = "all of the model's parameters; one must be trained" if found else "none of the model's parameters"
        raise TrainError(f"--freeze {pattern}: matches {what}: {_outline(list(trained))}")
    before = parameter_count(model)
    for name in found:
        trained.pop(name).requires_grad_(False)
    layers = f" and {norms} batch norm layers" if (norms := len(frozen_norms(model, pattern))) else ""
    return (
        f"train: --freeze {pattern}: {len(found)} tensors with {before - parameter_count(model):,} parameters{layers} "
        f"stay as they are; trained: {_outline(list(trained))}"
    )


def train_mode(model: nn.Module, pattern: str) -> None:
    """Put the model in training mode, except frozen batch norm, which keeps its statistics and normalises by them."""
    model.train()
    for norm in frozen_norms(model, pattern):
        norm.eval()


def frozen_norms(model: nn.Module, pattern: str) -> list[nn.Module]:
    """Return the layers with running statistics all of whose parameters, or statistics if they have none, are named."""
    found = []
    for name, layer in model.named_modules():
        own: dict[str, Tensor] = dict(layer.named_buffers(prefix=name, recurse=False))
        if pattern and any(key.endswith("running_mean") for key in own):
            own = dict(layer.named_parameters(prefix=name, recurse=False)) or own
            if all(re.search(pattern, key) for key in own):
                found.append(layer)
    return found


def _outline(names: list[str]) -> str:
    """List names; of each part of the model with more than two, the first and the number of the others."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(name.partition(".")[0], []).append(name)
    return ", ".join(
        ", ".join(own) if len(own) < 3 else f"{own[0]} and {len(own) - 1} more of {part}" for part, own in parts.items()
    )
