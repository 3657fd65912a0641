"""--checkpoint-activations: activations of a block are computed again in the backward pass instead of kept.

The random numbers are those of the first time, and so are loss and gradients, to the bit. Batch norm counts a batch
once. Names of parameters and buffers do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from train.errors import TrainError
from train.models import elements


def recompute_blocks(model: nn.Module, arch: str) -> None:
    """Make the blocks of the model compute their activations again: the elements of containers that have parts.

    Raises:
        TrainError: the model has none.
    """
    blocks = [element for element in dict.fromkeys(elements(model)) if any(True for _ in element.children())]
    if not blocks:
        raise TrainError(
            f"--checkpoint-activations: --arch {arch} has no blocks, which are modules with parts in a Sequential or "
            f"ModuleList; remove the option"
        )
    for block in blocks:
        # not a module around the block, whose name would be in the state dict; a deep copy gets a forward of its own
        block.forward = partial(_forward, block, block.forward)


def _forward(block: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _counted(block)), **named)


@contextmanager
def _counted(block: nn.Module) -> Iterator[None]:
    """Compute with copies of the buffers: the running statistics have this batch already."""
    own = [(part, name, value) for part in block.modules() for name, value in part.named_buffers(recurse=False)]
    for part, name, value in own:
        setattr(part, name, value.clone())
    try:
        yield
    finally:
        for part, name, value in own:
            setattr(part, name, value)
