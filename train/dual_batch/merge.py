"""How the server takes a worker's weights in: named tensors; integers, such as counters, stay the server's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Weights = dict[str, Tensor]


def merge_one(server: Weights, worker: Weights, factor: float, variant: str = "published") -> Weights:
    """W <- ((2 - f)*W + f*w)/2: the asynchronous merge (Lu et al., section III); f = 1 is the mean.

    follow_up: W <- (W + f*w)/(1 + f), arXiv 2509.26092.
    """
    share = factor / 2 if variant == "published" else factor / (1 + factor)
    return {
        name: (1 - share) * value + share * worker[name] if value.is_floating_point() else value
        for name, value in server.items()
    }


def merge_all(server: Weights, pushes: Sequence[tuple[Weights, float]]) -> Weights:
    """W <- sum(f_i*w_i)/sum(f_i): the synchronous merge."""
    total = sum(factor for _, factor in pushes)
    merged = {}
    for name, value in server.items():
        if value.is_floating_point():
            # the terms as tensors: sum()'s start of 0 would make the first one a copy for nothing
            first, *others = (weights[name] * (factor / total) for weights, factor in pushes)
            for other in others:
                first = first + other
            value = first  # noqa: PLW2901 - the merged one
        merged[name] = value
    return merged
