"""Operations on many tensors at once, for which torch has kernels but no public functions.

The only module that uses private names of torch: `_foreach_mul_` and `_foreach_norm`, which torch's own optimisers and
gradient clipping have called since torch 1.9. A loop over the public operations would start one kernel per tensor,
some hundreds per step, instead of a handful. tests/train/test_step.py compares them with that loop.
"""

from __future__ import annotations

import torch
from torch import Tensor


def multiply_(tensors: list[Tensor], factor: float) -> None:
    """Each tensor times `factor`, in place."""
    torch._foreach_mul_(tensors, factor)


def all_finite(tensors: list[Tensor]) -> bool:
    """Whether every tensor's norm is finite; it is not if a value is inf or nan."""
    norms = torch.stack([norm.float() for norm in torch._foreach_norm(tensors)])
    return bool(norms.isfinite().all())
