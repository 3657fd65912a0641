"""Detect outliers among comparable values. Pure.

A value must differ both by a factor and by more than the spread of the others, so that neither close values nor widely
scattered ones are reported.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

FACTOR = 1.3
DEVIATIONS = 6.0  # in units of the median absolute deviation of the others
_NORMAL = 1.4826  # converts it to the standard deviation of a normal distribution


def spread(values: Sequence[float]) -> float:
    """Return the distance from the median up to which values are considered normal."""
    middle, ordered = median(values), sorted(values)
    edge = len(ordered) // 4  # for few values, use their range without the extremes: the deviation depends on chance
    inner = ordered[edge : len(ordered) - edge]
    return max(DEVIATIONS * _NORMAL * median([abs(value - middle) for value in values]), inner[-1] - inner[0])


def far_below(value: float, others: Sequence[float], factor: float = FACTOR) -> bool:
    """Return whether the value is lower than the others, at least two, by the factor and by their spread."""
    return _far([-_log(other) for other in others], -_log(value), factor)


def far_above(value: float, others: Sequence[float], factor: float = FACTOR) -> bool:
    return _far([_log(other) for other in others], _log(value), factor)


def _far(others: Sequence[float], own: float, factor: float) -> bool:
    """Compare logarithms: speeds and latencies differ by factors."""
    beyond = own - median(others) if others else 0.0
    return len(others) >= 2 and beyond >= math.log(factor) - 1e-9 and beyond > spread(others)


def _log(value: float) -> float:
    return math.log(max(value, 1e-12))


def slow(values: Mapping[K, float], factor: float = FACTOR) -> list[K]:
    """Return the keys of values that are far below all others."""
    return [
        key
        for key, value in values.items()
        if len(values) > 2 and far_below(value, [other for name, other in values.items() if name != key], factor)
    ]
