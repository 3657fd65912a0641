"""Batch normalisation over the batches of all ranks, on any device and backend, for batches of different sizes.

torch's SyncBatchNorm works on GPUs only. One all-reduce forward and one backward, of float64 sums: with float32 sums, a
mean of 100 costs three digits of the variance. Elementwise operations use the input's type, at least float32. On a GPU
each pass over the input is one kernel of torch's SyncBatchNorm.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from train.errors import TrainError
from train.models import BATCH_NORMS


class _Normalise(torch.autograd.Function):
    """(x - mu)/sqrt(v + eps)*weight + bias with mu and v over all ranks; also returns mu, v and the number of values.

    Only x is saved for the backward pass, in its type.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, channels = x.contiguous(memory_format=_layout(x)), x.shape[1]
        count = torch.full((1,), x.numel() // channels, dtype=torch.float64, device=x.device)
        sums = _all_sum(torch.cat([*(_fused_sums if has_kernels(x) else _sums)(x, eps), count]))
        count = sums[-1]
        mean = sums[:channels] / count
        variance = (sums[channels : 2 * channels] / count - mean.square()).clamp_min(0)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        if has_kernels(x):
            out = torch.batch_norm_elemt(x, weight, bias, mean.to(_wide_type(x)), scale.to(_wide_type(x)), eps)
            return out, mean, variance, count
        out = (x - _wide(mean, x)).mul_(_wide(scale if weight is None else scale * weight, x))
        if bias is not None:
            out.add_(_wide(bias, x))
        return out.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, mean, scale, count = ctx.saved_tensors
        gradient = _fused_gradient if has_kernels(x) else _gradient
        dx, local = gradient(gradients[0], x, weight, mean, scale, count)
        # the gradients of bias and weight, of this rank: DDP averages them
        dbias, dweight = (None, None) if weight is None else local.to(weight.dtype).unbind()
        return dx, dweight, dbias, None


def has_kernels(x: Tensor) -> bool:
    """Whether torch has single kernels for the passes over `x`; they do not accept an empty batch."""
    return x.is_cuda and x.numel() > 0


def _sums(x: Tensor, _eps: float) -> tuple[Tensor, Tensor]:
    """Return the sums of this rank's values and of their squares, each (C,) float64."""
    axes = [0, *range(2, x.ndim)]
    # the square of the norm, because vector_norm sums in float64 without a float64 copy of the input
    return x.sum(axes, dtype=torch.float64), torch.linalg.vector_norm(x, dim=axes, dtype=torch.float64).square()


def _fused_sums(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Same as `_sums`, from mean and variance, which the kernel computes by Welford's method in float32."""
    mean, scale = (value.double() for value in torch.batch_norm_stats(x, eps))
    values = x.numel() // x.shape[1]
    return mean * values, (scale.square().reciprocal() - eps + mean.square()) * values


def _gradient(
    g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `x`, and (2, C) float64 the gradients of bias and weight from this rank's values."""
    g = g.to(torch.promote_types(g.dtype, torch.float32))
    axes = [0, *range(2, x.ndim)]
    normal = (x - _wide(mean, x)).mul_(_wide(scale, x))
    local = torch.stack([g.sum(axes, dtype=torch.float64), (g * normal).sum(axes, dtype=torch.float64)])
    factor = torch.ones_like(scale) if weight is None else weight.double()
    sums = _all_sum(local * factor) / count
    # g*weight - Sg/N - xhat*Sgx/N
    dx = normal.mul_(_wide(-sums[1], x)).addcmul_(g, _wide(factor, x)).sub_(_wide(sums[0], x)).mul_(_wide(scale, x))
    return dx.to(x.dtype), local


def _fused_gradient(
    g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, count: Tensor
) -> tuple[Tensor, Tensor]:
    """Same as `_gradient`. The kernels' second sum is of g*(x - mu), and they multiply by the weight at the end."""
    g, wide = g.contiguous(memory_format=_layout(x)), _wide_type(x)
    mean, narrow_scale = mean.to(wide), scale.to(wide)
    weight = None if weight is None else weight.to(wide)
    of_g, of_products, _, _ = torch.batch_norm_backward_reduce(g, x, mean, narrow_scale, weight, True, False, False)
    local = torch.stack([of_g.double(), of_products.double()])
    sums = _all_sum(local.clone()).to(wide)
    dx = torch.batch_norm_backward_elemt(g, x, mean, narrow_scale, weight, sums[0], sums[1], count.int().view(1))
    return dx, torch.stack([local[0], local[1] * scale])


def _layout(x: Tensor) -> torch.memory_format:
    """Return the memory format of `x`, as the kernels need it."""
    nhwc = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if nhwc else torch.contiguous_format


def _wide_type(x: Tensor) -> torch.dtype:
    """Return the type for computations with values of `x`."""
    return torch.promote_types(x.dtype, torch.float32)


def _wide(values: Tensor, like: Tensor) -> Tensor:
    """Return (C,) values as (1, C, 1, ...), in that type."""
    return values.view(1, -1, *[1] * (like.ndim - 2)).to(_wide_type(like))


def _all_sum(values: Tensor) -> Tensor:
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


class SyncBatchNorm(nn.BatchNorm1d):
    """Replacement for nn.BatchNorm1d/2d/3d; input (n, C, ...), n may differ between ranks and may be 0.

    Evaluation uses the running statistics and does not communicate.
    """

    over_ranks = True  # read by train.models.has_own_sync_batch_norm

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalise, scale and shift, in the input's type."""
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


PLAIN = {*BATCH_NORMS, SyncBatchNorm}  # layers that are a batch norm and nothing else


class SyncBatchNormAct(SyncBatchNorm):
    """Replacement for timm's BatchNormAct2d, which drops and activates what it normalises; same names of weights."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        out: Tensor = self.act(self.drop(super().forward(input)))
        return out


def convert(model: nn.Module) -> nn.Module:
    """Replace every batch norm in `model` by a synchronised one that shares its parameters and buffers.

    Raises:
        TrainError: a layer is a batch norm and something else, which the replacement would not do.
    """
    check(model, "custom")
    made: dict[nn.Module, SyncBatchNorm] = {}  # a layer in several places stays one
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm):
            made[layer] = made.get(layer) or _replacement(layer)
            if not name:
                return made[layer]
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, made[layer])
    return model


def convert_by_library(model: nn.Module) -> nn.Module:
    """Like `convert`, to torch's layers; by timm's function if the model has layers of timm.

    Raises:
        TrainError: see `convert`.
    """
    check(model, "library")
    convert_: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    if any(map(_is_of_timm, model.modules())):
        convert_ = importlib.import_module("timm.layers").convert_sync_batchnorm
    converted: nn.Module = convert_(model)
    return converted


def check(model: nn.Module, kind: str) -> None:
    """Raise TrainError if the model has a layer that is a batch norm and something else, unknown to `convert`."""
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and not (type(layer) in PLAIN or _is_of_timm(layer)):
            raise TrainError(
                f"--syncbn {kind}: {name or 'the model'} is a {type(layer).__qualname__} of {type(layer).__module__}, "
                f"which a synchronised batch norm may not equal; use torch's batch norm or timm's BatchNormAct2d, or "
                f"remove the option"
            )


def _is_of_timm(layer: nn.Module) -> bool:
    kind = type(layer)
    return kind.__module__.startswith("timm.") and kind.__name__ in ("BatchNormAct2d", "SyncBatchNormAct")


def _replacement(layer: _BatchNorm) -> SyncBatchNorm:
    kind = SyncBatchNormAct if _is_of_timm(layer) else SyncBatchNorm
    ours = kind(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    ours.weight, ours.bias = layer.weight, layer.bias
    ours.running_mean, ours.running_var = layer.running_mean, layer.running_var
    ours.num_batches_tracked, ours.training = layer.num_batches_tracked, layer.training
    for name, part in layer.named_children():  # drop and act
        setattr(ours, name, part)
    return ours
