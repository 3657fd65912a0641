"""When the nodes of a bench measure what: rounds of disjoint pairs, and the time that each phase gets. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_ROUNDS = 15  # those of 16 nodes; of more nodes each measures with so many others, and not with all
_JOIN = 20.0  # seconds that a node may need at least to start its container and to import torch


@dataclass(frozen=True)
class Timetable:
    """Seconds of each phase, in their order; `pair`: of one round. All nodes keep to it from a common start."""

    join: float  # at most: it ends when all nodes are ready
    local: float
    read: float
    pair: float
    together: float

    def total(self, rounds: int) -> float:
        """Until the last phase has ended, at the latest."""
        return self.join + self.local + self.read + rounds * self.pair + self.together


def rounds(nodes: int, most: int = MOST_ROUNDS) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs of the ranks 0 to nodes - 1; each pair at most once, the lower rank first.

    All pairs in nodes - 1 rounds (nodes, where their number is odd: one pauses) by the circle method: one rank stays,
    the others go round it. If that is more than `most`, so many of these rounds, evenly chosen.
    """
    size = nodes + nodes % 2
    every = []
    for turn in range(size - 1):
        ring = [size - 1, *((turn + place) % (size - 1) for place in range(size - 1))]
        pairs = ((ring[place], ring[size - 1 - place]) for place in range(size // 2))
        every.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < nodes))
    if len(every) <= most:
        return every
    return [every[place * len(every) // most] for place in range(most)]


def timetable(seconds: float, turns: int, *, gpus: bool, reads: bool) -> Timetable:
    """How `seconds` are divided, where the nodes measure pairs in so many rounds.

    Below a least time for each phase a measure would say nothing, so a short bench takes longer than it was given.
    """
    join = max(_JOIN, 0.25 * seconds)
    long = 4.0 if gpus else 1.0  # NCCL needs seconds to begin
    least = {"local": 2 * long, "read": 1.0 * reads, "pairs": turns * long, "together": long * (turns > 0)}
    shares = {"local": 3.0, "read": 1.5 * reads, "pairs": 6.0 * (turns > 0), "together": 1.0 * (turns > 0)}
    extra = max(seconds - join - sum(least.values()), 0.0) / sum(shares.values())
    found = {phase: least[phase] + extra * shares[phase] for phase in least}
    return Timetable(join, found["local"], found["read"], found["pairs"] / max(turns, 1), found["together"])


def minutes_needed(turns: int, *, gpus: bool, reads: bool) -> float:
    """The least that can be given without its being exceeded."""
    return math.ceil(timetable(0, turns, gpus=gpus, reads=reads).total(turns) / 6) / 10
