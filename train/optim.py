"""The optimizer by its name, and its parameter groups: weight decay, learning rates by layer, and what Muon gets."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from train import foreach
from train.config import Config
from train.errors import TrainError
from train.models import last_layer
from train.own import described, is_own, tried, unfit

Group = dict[str, Any]
CONTAINERS = (nn.Sequential, nn.ModuleList)


def make_optimizer(
    config: Config, model: nn.Module, parameters: Sequence[nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """Return the optimiser for the model's trainable parameters, or for their fp32 masters `parameters`, in order.

    Raises:
        TrainError: see `MuonAdamW` and `own_optimizer`.
    """
    parameters = parameters or [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = parameter_groups(config, model, parameters)
    if is_own(config.optimizer):
        return own_optimizer(config, groups)
    without = config.shards_weights and config.optimizer == "sgd"  # torch has no fused SGD for sharded weights
    fused = not without and all(p.dtype == torch.float32 and has_fused_kernel(p) for p in parameters)
    make: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(
            groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused
        ),
        "lars": lambda: LARS(groups, lr=config.lr, momentum=config.momentum, eta=config.lars_eta),
        "adamw": lambda: torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.momentum, config.adam_beta2), fused=fused
        ),
        "muon": lambda: MuonAdamW(groups, config.lr, config.muon_momentum, (config.momentum, config.adam_beta2), fused),
    }
    return make[config.optimizer]()


def own_optimizer(config: Config, groups: list[Group]) -> torch.optim.Optimizer:
    """Return the user's optimiser. The rates of its groups, relative to --lr, become `lr_scale`.

    Raises:
        TrainError: it cannot be used in place of one of ours.
    """
    text, given = config.optimizer, {parameter for group in groups for parameter in group["params"]}
    found = tried("optimizer", text, groups, config.lr)
    if not isinstance(found, torch.optim.Optimizer):
        raise unfit("optimizer", text, described(found))
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure and closure.default is closure.empty:
        raise unfit("optimizer", text, f"{described(found)}, whose step() needs a closure")
    taken = {parameter for group in found.param_groups for parameter in group["params"]}
    if taken != given:
        raise unfit(
            "optimizer",
            text,
            f"{described(found)} of {len(taken & given)} of the {len(given)} parameters, and {len(taken - given)} "
            f"others; --freeze leaves some out",
        )
    for group in found.param_groups:
        group["lr_scale"] = group.get("lr_scale", 1.0) * (float(group["lr"]) / config.lr)
    return found


def has_fused_kernel(parameter: nn.Parameter) -> bool:
    """Whether the fused update is faster; torch's CPU version is not."""
    return parameter.is_cuda


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore momenta and other state, but keep the settings of `optimizer`, which `load_state_dict` would replace.

    State tensors get the memory layout of the parameters. With another layout, fused kernels fail on GPUs and give
    wrong results on CPUs.
    """
    settings = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in settings] != [group["params"] for group in state["param_groups"]]:
        raise TrainError("the checkpoint was saved with other parameter groups; use the same options and code")
    optimizer.load_state_dict({"state": state["state"], "param_groups": settings})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter).copy_(value)


def state_size(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state tensors of one of our optimisers after the first update."""
    total = 0
    for group in optimizer.param_groups:
        moments = 2 if "betas" in group else int(group["momentum"] > 0 or isinstance(optimizer, LARS))
        total += moments * sum(parameter.numel() * parameter.element_size() for parameter in group["params"])
    return total


def present_state_size(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state tensors that there are now."""
    tensors = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def set_rate(optimizer: torch.optim.Optimizer, rate: float, momentum: float | None = None) -> None:
    """Set the learning rate of every group, times its `lr_scale`, and the momentum unless it is None."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
        if momentum is not None:
            group["momentum"] = momentum


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rates: You, Gitman, Ginsburg, arXiv 1708.03888, algorithm 1.

    local = eta*|w| / (|g| + wd*|w|), 1 if a norm is 0; v = m*v + lr*local*(g + wd*w); w -= v. One-dimensional tensors
    (biases, norms) get plain momentum SGD without decay.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, momentum: float = 0.9, weight_decay: float = 0.0, eta: float = 1e-3
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta})
        self._scaled: dict[int, foreach.Scaled] = {}  # by group number

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so no loss to return
        assert closure is None, "LARS takes no closure"
        for number, group in enumerate(self.param_groups):
            used = [parameter for parameter in group["params"] if parameter.grad is not None]
            for matrices in (True, False):
                chosen = [parameter for parameter in used if (parameter.ndim > 1) == matrices]
                self._update(chosen, group, number if matrices else None)

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any], matrices: int | None) -> None:
        """`matrices`: the group number, or None for one-dimensional parameters."""
        if not parameters:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        rate = group["lr"]
        if matrices is not None:
            decay, weights, slopes = group["weight_decay"], foreach.norms(parameters), foreach.norms(gradients)
            local = group["eta"] * weights / (slopes + decay * weights)
            rates = torch.where(
                (weights > 0) & (slopes > 0), rate * local, rate
            )  # not read on the CPU, which would wait for the device
            scaled = self._scaled.get(matrices)
            if scaled is None or not scaled.fits(parameters):
                scaled = self._scaled[matrices] = foreach.Scaled(parameters)
            foreach.copy_(scaled.values, gradients)
            foreach.add_(scaled.values, parameters, decay)
            scaled.multiply_(rates)
            gradients, rate = scaled.values, 1.0
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        velocities = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        foreach.multiply_(velocities, group["momentum"])
        foreach.add_(velocities, gradients, rate)
        foreach.add_(parameters, velocities, -1.0)


class MuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon for groups with `muon`, AdamW for the others, as one optimiser.

    Jordan et al., https://kellerjordan.github.io/posts/muon. Its updates are scaled to the size of AdamW's (Liu et al.,
    arXiv 2502.16982, section 2.2), so that both use the same learning rate and weight decay.
    """

    def __init__(
        self, groups: list[Group], lr: float, momentum: float, betas: tuple[float, float], fused: bool
    ) -> None:
        """`momentum`: Muon's, `betas`: AdamW's.

        Raises:
            TrainError: this torch has no Muon, or the model has no matrices for it.
        """
        if not hasattr(torch.optim, "Muon"):
            raise TrainError(
                f"--optimizer muon needs torch.optim.Muon, which torch {torch.__version__} lacks; use an image with "
                f"torch 2.9 or newer, or --optimizer adamw"
            )
        mine, others = ([group for group in groups if group["muon"] == muon] for muon in (True, False))
        if not mine:
            raise TrainError(
                "--optimizer muon: the model has no linear layers except its classifier that are trained; Muon is for "
                "transformers: use sgd or adamw"
            )
        if not others:
            raise TrainError("--optimizer muon: --freeze leaves nothing for its AdamW; train the last layer too")
        self._muon = torch.optim.Muon(mine, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, fused=fused)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Make both optimisers use this optimiser's groups and state."""
        for part, muon in ((self._muon, True), (self._adamw, False)):
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["muon"] == muon]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so no loss to return
        assert closure is None, "MuonAdamW takes no closure"
        self._muon.step()  # type: ignore[no-untyped-call]  # torch's stub
        self._adamw.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


def parameter_groups(config: Config, model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[Group]:
    """Return the groups of `parameters`: the model's trainable parameters or their fp32 masters, in order.

    They differ in weight decay, learning rate (`lr_scale`, a factor) and in whether they are Muon's. They match
    timm.optim's param_groups_weight_decay and param_groups_layer_decay, which fine-tuning recipes use (BEiT, Bao et
    al., arXiv 2106.08254; Clark et al., arXiv 2003.10555, section 3.3).
    """
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
        elif is_own(config.optimizer):
            group.setdefault("names", []).append(name)
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
