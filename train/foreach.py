"""Operations on lists of tensors, for which torch has kernels but no public functions.

The only module that uses private names of torch, but for one in `train.distributed.ddp`: `_foreach_mul_` and similar,
which torch's optimisers and gradient clipping have used since torch 1.9. A loop over public operations would launch one
kernel per tensor, hundreds per step, instead of a few. tests/train/trainer/test_step.py compares the results with such
a loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor


def multiply_(tensors: list[Tensor], factor: float) -> None:
    """Multiply each tensor by `factor`, in place."""
    torch._foreach_mul_(tensors, factor)


def add_(tensors: list[Tensor], others: list[Tensor], factor: float = 1.0) -> None:
    """Add `factor` times the other tensors, in place."""
    torch._foreach_add_(tensors, others, alpha=factor)


def copy_(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Copy the other tensors into the tensors, converting to their type."""
    alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for pair in zip(tensors, others, strict=True):  # for lists of mixed types torch launches one kernel per tensor
        for kept, tensor in zip(alike.setdefault((pair[0].dtype, pair[1].dtype), ([], [])), pair, strict=True):
            kept.append(tensor)
    for targets, sources in alike.values():
        torch._foreach_copy_(targets, sources)


def zero_(tensors: list[Tensor]) -> None:
    """Set every value to 0, including inf and nan."""
    if tensors:
        torch._foreach_zero_(tensors)


class Scaled:
    """Buffer for the values of several tensors that multiplies each one by its own factor with a single kernel.

    torch's `_foreach_mul` with factors on the device launches a kernel per tensor. Here each tensor starts at a
    separate row of a matrix, so that the factors form a column by which the matrix is multiplied.
    """

    ROW = 1024  # numbers; the rest of a tensor's last row is unused

    def __init__(self, tensors: list[Tensor]) -> None:
        """Allocate for these tensors, with their strides; all have one type and device."""
        rows = [-(-tensor.numel() // self.ROW) for tensor in tensors]
        first = tensors[0]
        self._rows = torch.zeros(sum(rows), self.ROW, dtype=first.dtype, device=first.device)
        starts = [self.ROW * row for row in accumulate(rows, initial=0)]
        self.values = [
            self._rows.as_strided(tensor.shape, tensor.stride(), start)
            for tensor, start in zip(tensors, starts, strict=False)
        ]
        self._owner = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows)).to(first.device)

    def fits(self, tensors: list[Tensor]) -> bool:
        mine, theirs = ([(each.shape, each.dtype) for each in several] for several in (self.values, tensors))
        return mine == theirs

    def multiply_(self, factors: Tensor) -> None:
        """Multiply each tensor's values by its factor; `factors`: (n,), on the device."""
        self._rows.mul_(factors[self._owner, None])


def norms(tensors: list[Tensor], order: float = 2) -> Tensor:
    """Return the norm of each tensor, (n,), in at least fp32; the tensors have one type."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack([norm.to(wide) for norm in torch._foreach_norm(tensors, order)])


def finite(tensors: list[Tensor]) -> Tensor:
    """Return whether every tensor's norm is finite, which implies that no value is inf or nan; () bool, on the device.

    The norm is the sum of squares, which is fastest, unless 16 bits are too few for it.
    """
    narrow = any(tensor.dtype.itemsize < torch.float32.itemsize for tensor in tensors)
    return norms(tensors, math.inf if narrow else 2).isfinite().all()


def first_not_finite(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the name of the first tensor with inf or nan, or ""; waits for the device."""
    return next((name for name, value in named if not value.isfinite().all()), "")
