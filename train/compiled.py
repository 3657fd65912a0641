"""--compile: a model, or each block of a sharded one, that never runs uncompiled without a word."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from train.config import Config
from train.errors import TrainError, alike_on_a_machine

NO_COMPILER = re.compile(r"No working C\+\+ compiler found|Failed to find C compiler")  # torch on a CPU; Triton


class Compiled(nn.Module):
    """A compiled model."""

    def __init__(self, model: nn.Module, mode: str, limit: int) -> None:
        """`limit`: how often torch may compile it."""
        super().__init__()
        _allow(limit)
        self._compiled = _compile(model, mode)
        self._limit = limit

    def forward(self, images: Tensor) -> Any:
        """Call the model. Raises TrainError if it would not be compiled for this batch."""
        what = f"the model was compiled {self._limit} times, as often as the run has kinds of batches", "images"
        return _called(self._compiled, what, images)


def compiled(model: nn.Module, config: Config) -> nn.Module:
    """Compile the model if --compile is set, once for each kind of batch, in training and in validation."""
    return Compiled(model, config.compile_mode, kinds(config)) if config.compile else model


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module], config: Config) -> str:
    """Compile what each of the blocks computes, in place; return a line about what that is of the model.

    Names of parameters stay. It is the block's `forward` and not, as by its method `compile`, its call: hooks of
    fully_shard would break the graph of a call, and its code is one for all modules.

    Raises:
        TrainError: there are no blocks.
    """
    if not blocks:
        raise TrainError(
            f"--compile with --parallel {config.parallel} compiles a model's blocks, which are modules with weights in "
            f"a Sequential or ModuleList, and --arch {config.arch} has none; remove --compile"
        )
    # torch counts by code, which blocks of a class share: a graph for each block and kind of batch, or fewer, as blocks
    # that are alike share one
    limit = kinds(config) * len(blocks)
    _allow(limit)
    names = {part: name for name, part in model.named_modules()}
    for block in blocks:
        what = (
            f"block {names[block]} was compiled {limit} times with those of its class, once for each block and kind of "
            f"batch"
        )
        block.forward = partial(_called, _compile(block.forward, config.compile_mode), (what, "inputs"))
    inside = {parameter for block in blocks for parameter in block.parameters()}
    share = sum(each.numel() for each in inside) / sum(each.numel() for each in model.parameters())
    return f"{len(blocks)} blocks with {share:.0%} of the weights; what is outside of them is not compiled"


def kinds(config: Config) -> int:
    """Return how many kinds of batches a run has.

    In training and in validation, and per side, there are full batches, what is left of them, and fillers of ranks that
    have no images left.
    """
    return 2 * 3 * len(config.sides())


def _compile(call: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Return a graph per batch size: torch's default would create a dynamic one after an epoch's smaller last batch."""
    found: Callable[..., Any] = torch.compile(call, dynamic=False, mode=mode)
    return found


def _allow(limit: int) -> None:
    """Let torch compile a piece of code so often, then fail; by its default of 8, further shapes run uncompiled."""
    settings: Any = importlib.import_module("torch._dynamo.config")  # takes seconds
    name = "recompile" if hasattr(settings, "recompile_limit") else "cache_size"  # torch before 2.6
    setattr(settings, f"{name}_limit", limit)
    total = f"accumulated_{name}_limit"  # whatever the code is called with; 256 by default
    setattr(settings, total, max(limit, getattr(settings, total)))
    for flag in ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit"):
        if hasattr(settings, flag):
            setattr(settings, flag, True)


def _called(call: Callable[..., Any], what: tuple[str, str], *arguments: Any, **named: Any) -> Any:
    """Call what was compiled. Raises TrainError if it cannot be, or would not be for these arguments."""
    try:
        return call(*arguments, **named)
    except Exception as error:
        if NO_COMPILER.search(str(error)):
            with alike_on_a_machine():
                raise TrainError(
                    "--compile needs gcc and g++ for the code that torch.compile generates, and they are not here; "
                    "install them, use an image that has them, or remove --compile"
                ) from error
        if type(error).__name__ not in ("FailOnRecompileLimitHit", "FailOnCacheLimitHit"):
            raise
        found, inputs = what
        shapes = ", ".join(str(tuple(each.shape)) for each in arguments if isinstance(each, Tensor))
        raise TrainError(
            f"--compile: a part of {found}, and {inputs} of shape {shapes} need another time, so it would run "
            f"uncompiled; to see what changes, set TORCH_LOGS=recompiles; or remove --compile"
        ) from error
