"""What a parallel method can do: its module declares it, and `train.combinations` refuses the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from train.config import Config


def no_problems(_config: Config, _processes: int) -> Iterator[str]:
    """Any options and number of processes."""
    yield from ()


@dataclass(frozen=True)
class Abilities:
    """`cannot`: names of options that the method does not support, as in `combinations.used`.

    `problems` gives the further reasons to refuse options on a number of processes.
    """

    cannot: frozenset[str] = frozenset()
    problems: Callable[[Config, int], Iterator[str]] = no_problems
    divides_weights: bool = False  # every rank has only a part of each
