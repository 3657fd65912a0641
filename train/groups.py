"""Parameter groups: weight decay, layer-wise learning rates, and parameters for Muon.

They match timm.optim's param_groups_weight_decay and param_groups_layer_decay, which fine-tuning recipes use (BEiT, Bao
et al., arXiv 2106.08254; Clark et al., arXiv 2003.10555, section 3.3). `lr_scale`: a group's learning rate factor.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

from torch import nn

from train.config import Config
from train.models import last_layer

Group = dict[str, Any]
CONTAINERS = (nn.Sequential, nn.ModuleList)


def parameter_groups(config: Config, model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Group]:
    """Return the groups of `parameters`: the model's trainable parameters or their fp32 masters, in order."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    layer = layers(model) if config.layer_decay < 1 else {name: 0 for name, _ in named}
    top, matrices = max(layer.values(), default=0), hidden_matrices(model) if config.optimizer == "muon" else set()
    exempt = _exempt(config, model)
    found: dict[tuple[bool, int, bool], Group] = {}
    for (name, own), parameter in zip(named, parameters, strict=True):
        decayed = config.decay == "all" or not (own.ndim <= 1 or name.endswith(".bias"))
        decayed = decayed and not any(fnmatch(name, pattern) for pattern in exempt)
        key = (name not in matrices, layer[name], not decayed)
        group: Group = found.setdefault(key, {"params": [], "weight_decay": config.weight_decay if decayed else 0.0})
        group["params"].append(parameter)
        if config.layer_decay < 1:
            group["lr_scale"] = config.layer_decay ** (top - layer[name])
        if config.optimizer == "muon":
            group["muon"] = name in matrices
    return [found[key] for key in sorted(found)]


def _exempt(config: Config, model: nn.Module) -> list[str]:
    """Return names and patterns of parameters without decay, including the model's own, such as position embeddings."""
    own: Any = getattr(model, "no_weight_decay", None)
    return [*config.no_decay, *(own() if own and config.decay == "weights" else ())]


def hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of the weights of linear layers, except the classifier; embeddings do not count."""
    outside = {name for name, part in model.named_modules() if isinstance(part, nn.Embedding)}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and name.endswith("weight") and name.rpartition(".")[0] not in outside
    } - set(last_layer(model))


def layers(model: nn.Module) -> dict[str, int]:
    """Return the layer number of each parameter, from the input on: as defined by timm models, else by blocks.

    A block is an element of a container, at any depth, with a matrix. All parameters before the first block form a
    layer, as does each later matrix outside of blocks. Norms and biases outside of blocks belong to the layer before.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher:
        known: dict[str, int] = importlib.import_module("timm.models").group_parameters(
            model, matcher(coarse=False), reverse=True
        )
        return known
    matrices = [name for name, parameter in model.named_parameters() if parameter.ndim > 1]
    blocks = [f"{block}." for block in _blocks(model)]
    blocks = [block for block in blocks if any(name.startswith(block) for name in matrices)]
    found: dict[str, int] = {}
    number, current = 0, ""
    for name, parameter in model.named_parameters():
        block = next((each for each in blocks if name.startswith(each)), "")
        if block != current if block else number and parameter.ndim > 1:
            number, current = number + 1, block
        found[name] = number
    return found


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS):
            yield path
        else:
            yield from _blocks(child, f"{path}.")
