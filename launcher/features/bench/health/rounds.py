"""Schedule of a benchmark: rounds of disjoint pairs and the duration of each phase. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_ROUNDS = 15  # enough for 16 nodes; with more nodes, each is measured with this many others only
_JOIN = 20.0  # minimum of seconds to allow for starting the container and importing torch
_JOINING = 0.25  # share of the time for it


@dataclass(frozen=True)
class Timetable:
    """Seconds of each phase in order; `pair`: of one round. All nodes follow it from a common start."""

    join: float  # maximum: it ends when all nodes are ready
    local: float
    read: float
    pair: float
    together: float
    model: float = 0.0  # after all that a node is judged by

    def total(self, rounds: int) -> float:
        """Return the maximum number of seconds until the end of the last phase."""
        return self.join + self.local + self.read + rounds * self.pair + self.together + self.model


def rounds(nodes: int, most: int = MOST_ROUNDS) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs of the ranks 0 to nodes - 1; each pair at most once, the lower rank first.

    The circle method gives all pairs in nodes - 1 rounds (in `nodes` rounds if their number is odd: one rank pauses
    in each): one rank is fixed, the others rotate. If these are more than `most`, that many are chosen evenly.
    """
    size = nodes + nodes % 2
    every = []
    for turn in range(size - 1):
        ring = [size - 1, *((turn + index) % (size - 1) for index in range(size - 1))]
        pairs = ((ring[index], ring[size - 1 - index]) for index in range(size // 2))
        every.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < nodes))
    if len(every) <= most:
        return every
    return [every[index * len(every) // most] for index in range(most)]


def timetable(seconds: float, turns: int, *, gpus: bool, reads: bool, model: bool = False) -> Timetable:
    """Divide `seconds` among the phases. turns: number of rounds of pairs.

    Each phase has a minimum duration for meaningful results, so a short benchmark takes longer than requested.
    """
    join = max(_JOIN, _JOINING * seconds)
    long = 4.0 if gpus else 1.0  # NCCL needs seconds to initialize
    least = {"local": 2 * long, "read": 1.0 * reads, "pairs": turns * long, "together": long * (turns > 0)}
    shares = {"local": 3.0, "read": 1.5 * reads, "pairs": 6.0 * (turns > 0), "together": 1.0 * (turns > 0)}
    if model:  # another process imports torch, and torchvision
        least["model"], shares["model"] = 20.0, 2.0
    extra = max(seconds - join - sum(least.values()), 0.0) / sum(shares.values())
    found = {phase: least[phase] + extra * shares[phase] for phase in least}
    pair = found["pairs"] / max(turns, 1)
    return Timetable(join, found["local"], found["read"], pair, found["together"], found.get("model", 0.0))


def minutes_needed(turns: int, *, gpus: bool, reads: bool, model: bool = False) -> float:
    """Return the shortest duration in minutes that the benchmark does not exceed."""
    shortest = timetable(0, turns, gpus=gpus, reads=reads, model=model).total(turns)
    return math.ceil(max(shortest, (shortest - _JOIN) / (1 - _JOINING)) / 6) / 10
