"""Which of several like values is far from the others. Pure.

Far is measured twice: by a factor, and by the spread of the others, so that neither values that are all close nor
values that are all over the place give an alarm.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

FACTOR = 1.3
DEVIATIONS = 6.0  # of the others, by their median absolute deviation
_NORMAL = 1.4826  # makes that the standard deviation where values are normally distributed


def spread(values: Sequence[float]) -> float:
    """How far from their median such values are still ordinary."""
    middle, ordered = median(values), sorted(values)
    edge = len(ordered) // 4  # of few values the deviation is a matter of chance: then their range, without the ends
    inner = ordered[edge : len(ordered) - edge]
    return max(DEVIATIONS * _NORMAL * median([abs(value - middle) for value in values]), inner[-1] - inner[0])


def far_below(value: float, others: Sequence[float], factor: float = FACTOR) -> bool:
    """Whether it is that much less than the others, of which there are two at least."""
    return _far([-_log(other) for other in others], -_log(value), factor)


def far_above(value: float, others: Sequence[float], factor: float = FACTOR) -> bool:
    return _far([_log(other) for other in others], _log(value), factor)


def _far(others: Sequence[float], own: float, factor: float) -> bool:
    """On a scale of logarithms: speeds, and delays, that differ at all differ by factors."""
    beyond = own - median(others) if others else 0.0
    return len(others) >= 2 and beyond >= math.log(factor) - 1e-9 and beyond > spread(others)


def _log(value: float) -> float:
    return math.log(max(value, 1e-12))


def slow(values: Mapping[K, float], factor: float = FACTOR) -> list[K]:
    """Those that are far below all others."""
    return [
        key
        for key, value in values.items()
        if len(values) > 2 and far_below(value, [other for name, other in values.items() if name != key], factor)
    ]
