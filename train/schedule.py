"""The learning rate scheduler: pure functions of the step, so that a checkpoint stores only the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

from train.config import ADAM, Config
from train.own import Function, is_own, own, tried, unfit

Schedule = Callable[[int], float]
CYCLED_MOMENTUM = 0.85, 0.95  # torch's defaults


@dataclass(frozen=True)
class OneCycle:
    """Smith and Topin, arXiv 1708.07120, as torch.optim.lr_scheduler.OneCycleLR computes it (cosine, two phases).

    Over `total` steps the rate rises from peak/div to peak in the first `warmup` share, then falls to
    peak/div/final_div.
    """

    peak: float
    total: int
    warmup: float = 0.3
    div: float = 25.0
    final_div: float = 1e4

    def __call__(self, step: int) -> float:
        """Return the rate of step `step` (counted from 0); the last rate for steps past the end."""
        first = self.peak / self.div
        return _two_phases(step, self.total, self.warmup, (first, self.peak, first / self.final_div))


@dataclass(frozen=True)
class WarmUp:
    """Linear warm-up in the first w steps, then `after`, a function of the completed fraction of the other steps."""

    peak: float
    total: int
    steps: int  # w
    after: Callable[[float], float]
    start: float = 0.0  # as a fraction of the peak

    def __call__(self, step: int) -> float:
        """Return the rate of step `step` (counted from 0)."""
        if step < self.steps:
            return _rising(self.peak, self.start, step, self.steps)
        return self.peak * self.after(min((step - self.steps) / max(self.total - self.steps, 1), 1.0))


@dataclass(frozen=True)
class MultiStep:
    """Multiplies the rate by `gamma` at each milestone (a fraction of the run), after a linear warm-up."""

    peak: float
    total: int
    steps: int
    milestones: tuple[float, ...]
    gamma: float
    start: float = 0.0

    def __call__(self, step: int) -> float:
        """Return the rate of step `step` (counted from 0)."""
        if step < self.steps:
            return _rising(self.peak, self.start, step, self.steps)
        return self.peak * self.gamma ** sum(step >= round(share * self.total) for share in self.milestones)


@dataclass(frozen=True)
class Own:
    """The user's function of a step and the number of steps, times the peak."""

    peak: float
    total: int
    factor: Function

    def __call__(self, step: int) -> float:
        """Return the rate of step `step` (counted from 0); the last rate for steps past the end."""
        return self.peak * float(self.factor(min(step, self.total - 1), self.total))


def own_schedule(text: str, peak: float, total: int) -> Own:
    """Return the schedule of --schedule MODULE:FUNCTION. Raises TrainError if it is not a number of at least 0.

    It is tried at the first, the middle and the last step.
    """
    for step in (0, total // 2, total - 1):
        found = tried("schedule", text, step, total)
        if not isinstance(found, Real) or not 0 <= float(found) < math.inf:
            raise unfit("schedule", text, f"{found!r} for step {step} of {total}")
    return Own(peak, total, own("schedule", text))


def _rising(peak: float, start: float, step: int, steps: int) -> float:
    """Rise from start * peak, as torch's LinearLR(start, 1, steps); with start 0, in equal parts from peak / steps."""
    if start == 0:
        return peak * ((step + 1) / steps)
    return peak * (start + (1 - start) * step / steps)


def _two_phases(step: int, total: int, warmup: float, values: tuple[float, float, float]) -> float:
    """Move from the first value to the second in the first `warmup` fraction of the steps, then to the third."""
    first, middle, last = values
    top = warmup * total - 1
    if step <= top:
        return _cosine(first, middle, step / top if top > 0 else 1.0)
    return _cosine(middle, last, min((step - top) / max(total - 1 - top, 1e-9), 1.0))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


def half_cosine(share: float) -> float:
    """Fall from 1 to 0 along half a cosine (Loshchilov and Hutter, arXiv 1608.03983, without restarts)."""
    return _cosine(1.0, 0.0, share)


def straight(share: float) -> float:
    """Fall from 1 to 0 linearly."""
    return 1.0 - share


def peak_rate(config: Config, global_batch: int) -> float:
    """Return --lr, by default scaled linearly with the global batch (Goyal et al., arXiv 1706.02677, section 2.1).

    sqrt is for Adam (Malladi et al., arXiv 2205.10287, without its changes of beta1 and beta2).
    """
    times = global_batch / config.lr_reference_batch
    return config.lr * {"linear": times, "sqrt": math.sqrt(times), "none": 1.0}[config.lr_scaling]


def scaled_for_sgd(config: Config, global_batch: int) -> str:
    """Return what to say of a rate of Adam that is scaled linearly with the batch, or ""."""
    peak = peak_rate(config, global_batch)
    if config.optimizer not in ADAM or config.lr_scaling != "linear" or peak == config.lr:
        return ""
    return (
        f"--lr {config.lr:g} is scaled linearly to {peak:g} for the global batch of {global_batch}, which is for sgd; "
        f"for {config.optimizer} --lr-scaling sqrt or none is usual"
    )


def make_schedule(config: Config, global_batch: int, total: int) -> Schedule:
    """Return the schedule for a run of `total` optimiser steps. Raises TrainError: see `own_schedule`."""
    peak = peak_rate(config, global_batch)
    warmup = _warmup(config)
    if is_own(config.schedule):
        return own_schedule(config.schedule, peak, total)
    if config.schedule == "onecycle":
        return OneCycle(peak, total, warmup, config.div_factor, config.final_div_factor)
    steps = round(warmup * total)
    if config.schedule == "multistep":
        return MultiStep(peak, total, steps, config.milestones, config.gamma, config.warmup_start)
    return WarmUp(peak, total, steps, half_cosine if config.schedule == "cosine" else straight, config.warmup_start)


def momentum_at(config: Config, step: int, total: int) -> float | None:
    """Return the momentum of a step with --cycle-momentum, as in torch.optim.lr_scheduler.OneCycleLR, else None."""
    low, high = CYCLED_MOMENTUM
    return _two_phases(step, total, _warmup(config), (high, low, high)) if config.cycle_momentum else None


def _warmup(config: Config) -> float:
    return config.warmup if config.warmup >= 0 else 0.3 if config.schedule == "onecycle" else 0.05
