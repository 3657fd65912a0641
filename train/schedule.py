"""Learning-rate schedules as pure functions of the step: a checkpoint stores the step and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from train.config import Config


@dataclass(frozen=True)
class OneCycle:
    """Smith and Topin, arXiv 1708.07120, as torch.optim.lr_scheduler.OneCycleLR computes it (cosine, two phases).

    `total` steps in all; the rate rises from peak/div to peak over the first `warmup` share, then falls to
    peak/div/final_div.
    """

    peak: float
    total: int
    warmup: float = 0.3
    div: float = 25.0
    final_div: float = 1e4

    def __call__(self, step: int) -> float:
        """The rate of step `step` (0 first). Past the end it stays at the last rate instead of raising."""
        first = self.peak / self.div
        last = first / self.final_div
        top = self.warmup * self.total - 1
        if step <= top:
            return _cosine(first, self.peak, step / top if top > 0 else 1.0)
        return _cosine(self.peak, last, min((step - top) / max(self.total - 1 - top, 1e-9), 1.0))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


def peak_rate(config: Config, global_batch: int) -> float:
    """--lr, scaled linearly with the global batch (Goyal et al., arXiv 1706.02677, section 2.1) unless told not to."""
    return config.lr * (global_batch / config.lr_reference_batch if config.lr_scaling == "linear" else 1.0)


def make_schedule(config: Config, global_batch: int, total: int) -> OneCycle:
    """The schedule of a run of `total` optimiser steps."""
    return OneCycle(peak_rate(config, global_batch), total, config.warmup, config.div_factor, config.final_div_factor)
