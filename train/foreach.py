"""Operations on many tensors at once, for which torch has kernels but no public functions.

The only module that uses private names of torch: `_foreach_mul_` and its kin, which torch's own optimisers and gradient
clipping have called since torch 1.9. A loop over the public operations would start one kernel per tensor, some hundreds
per step, instead of a handful. tests/train/test_step.py compares them with that loop.
"""

from __future__ import annotations

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


def sums(tensors: list[Tensor], others: list[Tensor], factor: float) -> list[Tensor]:
    """Each tensor plus `factor` times the other."""
    return list(torch._foreach_add(tensors, others, alpha=factor))


def scaled(tensors: list[Tensor], factors: Tensor) -> list[Tensor]:
    """Each tensor times its own factor; (n,)."""
    return list(torch._foreach_mul(tensors, factors.unbind()))


def norms(tensors: list[Tensor]) -> Tensor:
    """(n,) the norm of each tensor, in at least fp32; the tensors have one type."""
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack([norm.to(wide) for norm in torch._foreach_norm(tensors)])


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether every tensor's norm is finite; it is not if a value is inf or nan."""
    return bool(norms(tensors).isfinite().all())
