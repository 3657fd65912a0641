"""Batch normalisation over the batches of all ranks, on any device and backend, for batches of different sizes.

torch's own SyncBatchNorm works on GPUs only. One all-reduce forward and one backward, of float64 sums: with float32
sums a mean of 100 costs three digits of the variance. Elementwise operations use the input's type, at least float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _Normalise(torch.autograd.Function):
    """(x - mu)/sqrt(v + eps)*weight + bias with mu and v over all ranks; also returns mu, v and the number of values.

    Only x is kept for the backward pass, in its own type.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        axes, channels = [0, *range(2, x.ndim)], x.shape[1]
        count = torch.full((1,), x.numel() // channels, dtype=torch.float64, device=x.device)
        # the square of the norm, because vector_norm sums in float64 without a float64 copy of the input
        squares = torch.linalg.vector_norm(x, dim=axes, dtype=torch.float64).square()
        sums = _all_sum(torch.cat([x.sum(axes, dtype=torch.float64), squares, count]))
        count = sums[-1]
        mean = sums[:channels] / count
        variance = (sums[channels : 2 * channels] / count - mean.square()).clamp_min(0)
        scale = (variance + eps).rsqrt()
        out = (x - _wide(mean, x)).mul_(_wide(scale if weight is None else scale * weight, x))
        if bias is not None:
            out.add_(_wide(bias, x))
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return out.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, mean, scale, count = ctx.saved_tensors
        g = gradients[0].to(torch.promote_types(gradients[0].dtype, torch.float32))
        axes = [0, *range(2, x.ndim)]
        normal = (x - _wide(mean, x)).mul_(_wide(scale, x))
        # the gradients of bias and weight, of this rank: DDP averages them
        local = torch.stack([g.sum(axes, dtype=torch.float64), (g * normal).sum(axes, dtype=torch.float64)])
        factor = torch.ones_like(scale) if weight is None else weight.double()
        sums = _all_sum(local * factor) / count
        # g*weight - Sg/N - xhat*Sgx/N
        dx = normal.mul_(_wide(-sums[1], x)).addcmul_(g, _wide(factor, x)).sub_(_wide(sums[0], x)).mul_(_wide(scale, x))
        dbias, dweight = (None, None) if weight is None else local.to(weight.dtype).unbind()
        return dx.to(x.dtype), dweight, dbias, None


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """(C,) as (1, C, 1, ...), in the type in which values of `like` are computed."""
    kind = torch.promote_types(like.dtype, torch.float32)
    return values.view(1, -1, *[1] * (like.ndim - 2)).to(kind)


def _all_sum(values: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


class SyncBatchNorm(nn.BatchNorm1d):
    """A drop-in for nn.BatchNorm1d/2d/3d; input (n, C, ...), n may differ between ranks and may be 0.

    Evaluation uses the running statistics and does not communicate.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalised, scaled and shifted, in the input's type."""
        if input.ndim < 2:
            raise ValueError(f"expected (n, C, ...), got {input.ndim} dimension(s)")
        if not self.training and self.running_mean is not None:
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        out: Tensor
        out, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.running_mean is not None:
            self._track(mean, variance, count)
        return out

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp_min(1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def convert(model: nn.Module) -> nn.Module:
    """`model` with every batch norm replaced by a synchronised one that shares its parameters and buffers."""
    if isinstance(model, BATCH_NORMS) and not isinstance(model, SyncBatchNorm):
        ours = SyncBatchNorm(model.num_features, model.eps, model.momentum, model.affine, model.track_running_stats)
        ours.weight, ours.bias = model.weight, model.bias
        ours.running_mean, ours.running_var = model.running_mean, model.running_var
        ours.num_batches_tracked, ours.training = model.num_batches_tracked, model.training
        return ours
    for name, child in model.named_children():
        setattr(model, name, convert(child))
    return model
