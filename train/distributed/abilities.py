"""Capabilities of a parallel method: declared by its module, checked by `train.combinations`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from train.config import Config


def no_problems(_config: Config, _processes: int) -> Iterator[str]:
    """Accept any options and number of processes."""
    yield from ()


@dataclass(frozen=True)
class Abilities:
    """`cannot`: names of options that the method does not support, as in `combinations.used`.

    `problems`: yields further reasons to reject options or the number of processes.
    """

    cannot: frozenset[str] = frozenset()
    problems: Callable[[Config, int], Iterator[str]] = no_problems
    shards_weights: bool = False  # every rank has only a shard of each weight
