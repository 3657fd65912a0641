"""Operations on many tensors at once, for which torch has kernels but no public functions.

The only module that uses private names of torch: `_foreach_mul_` and its kin, which torch's own optimisers and gradient
clipping have called since torch 1.9. A loop over the public operations would start one kernel per tensor, some hundreds
per step, instead of a handful. tests/train/test_step.py compares them with that loop.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor


def multiply_(tensors: list[Tensor], factor: float) -> None:
    """Each tensor times `factor`, in place."""
    torch._foreach_mul_(tensors, factor)


def add_(tensors: list[Tensor], others: list[Tensor], factor: float = 1.0) -> None:
    """Adds `factor` times each other tensor, in place."""
    torch._foreach_add_(tensors, others, alpha=factor)


def copy_(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Copies each other tensor into the tensor, in the tensor's type."""
    alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for pair in zip(tensors, others, strict=True):  # in lists of mixed types torch starts one kernel per tensor
        for kept, tensor in zip(alike.setdefault((pair[0].dtype, pair[1].dtype), ([], [])), pair, strict=True):
            kept.append(tensor)
    for targets, sources in alike.values():
        torch._foreach_copy_(targets, sources)


def zero_(tensors: list[Tensor]) -> None:
    """Sets every value to 0, inf and nan too."""
    if tensors:
        torch._foreach_zero_(tensors)


class Scaled:
    """Memory for values of as many tensors, in which each is multiplied by a factor of its own with one kernel.

    torch's `_foreach_mul` with a factor per tensor that is on the device starts a kernel per tensor. Here each tensor
    begins in a row of its own of a matrix, so all factors are a column by which the matrix is multiplied.
    """

    ROW = 1024  # numbers; what is left of a tensor's last row is not used

    def __init__(self, tensors: list[Tensor]) -> None:
        """As large as these, with their strides; all of one type and on one device."""
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
        """Each tensor's values times its factor; (n,), on the device."""
        self._rows.mul_(factors[self._owner, None])


def norms(tensors: list[Tensor]) -> Tensor:
    """(n,) the norm of each tensor, in at least fp32; the tensors have one type."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack([norm.to(wide) for norm in torch._foreach_norm(tensors)])


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether every tensor's norm is finite; it is not if a value is inf or nan."""
    return bool(norms(tensors).isfinite().all())
