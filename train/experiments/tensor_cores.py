"""--amp O2 and O3 on a CPU: 16-bit products as a GPU computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class TensorCores(TorchFunctionMode):
    """Computes 16-bit products on a CPU like a GPU's tensor cores: 16-bit inputs, fp32 sums, rounded once.

    torch's own fp16 convolutions on CPU sum gradients image by image in fp16, unlike any GPU, and are 30 times slower.
    """

    PRODUCTS = frozenset((functional.conv1d, functional.conv2d, functional.conv3d, functional.linear, torch.matmul))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute products of fp16 tensors in fp32, also in the backward pass by the gradients of the casts."""
        half = args and isinstance(args[0], Tensor) and args[0].dtype is torch.float16
        if not (half and func in self.PRODUCTS):
            return func(*args, **(kwargs or {}))
        wide = [value.float() if isinstance(value, Tensor) else value for value in args]
        named = {key: value.float() if isinstance(value, Tensor) else value for key, value in (kwargs or {}).items()}
        return func(*wide, **named).half()
