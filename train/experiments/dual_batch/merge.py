"""Merge workers' weights into the server's; integers, such as counters, keep the server's values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Weights = dict[str, Tensor]


def merge_one(server: Weights, worker: Weights, factor: float, variant: str = "published") -> Weights:
    """The asynchronous merge, W <- ((2 - f)*W + f*w)/2 (Lu et al., section III); f = 1 gives the mean.

    follow_up: W <- (W + f*w)/(1 + f), arXiv 2509.26092.
    """
    share = factor / 2 if variant == "published" else factor / (1 + factor)
    return {
        name: (1 - share) * value + share * worker[name] if value.is_floating_point() else value
        for name, value in server.items()
    }


def merge_all(server: Weights, pushes: Sequence[tuple[Weights, float]]) -> Weights:
    """The synchronous merge, W <- sum(f_i*w_i)/sum(f_i)."""
    total = sum(factor for _, factor in pushes)
    merged = {}
    for name, value in server.items():
        if value.is_floating_point():
            # not sum(): its start value of 0 would copy the first term needlessly
            first, *others = (weights[name] * (factor / total) for weights, factor in pushes)
            for other in others:
                first = first + other
            value = first  # noqa: PLW2901 - the merged value
        merged[name] = value
    return merged
