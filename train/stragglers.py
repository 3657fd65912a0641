"""Detect slow ranks from the time that each rank spent on its own work in each interval.

A rank is persistently slow if it was the slowest in SLOWEST of the last WINDOW intervals and its mean over them is at
least RATIO times the median of all ranks' means. If a different rank is slow in each interval, the bottleneck is the
data loader or the collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

KINDS = ("data wait", "transfer", "forward")  # kinds of own work, in the order of a rank's figures
SHOWN = {"forward": "forward pass"}
WINDOW, SLOWEST, RATIO = 8, 6, 1.15
WORTH = 0.01  # fraction of an interval: a smaller excess over the median is ignored
NAMED = 3  # maximum number of ranks named at the end of a run

Own = Sequence[Sequence[float]]  # rank -> seconds of each of KINDS, in one interval


@dataclass(frozen=True)
class Slow:
    """The rank with the most own work: `ratio` times the median of all ranks, mostly due to `kind`."""

    rank: int
    ratio: float
    kind: str  # one of KINDS
    excess: float  # seconds above the median

    def matters(self, seconds: float) -> bool:
        """Whether the rank counts as slow in an interval of `seconds`."""
        return self.ratio >= RATIO and self.excess >= WORTH * seconds


def slowest(own: Own) -> Slow | None:
    """Return the slowest rank, None if the ranks did no work."""
    totals = [sum(parts) for parts in own]
    middle = median(totals)
    if middle <= 0:
        return None
    rank = totals.index(max(totals))
    excess = [mine - median(all_ranks) for mine, all_ranks in zip(own[rank], zip(*own, strict=True), strict=True)]
    return Slow(rank, totals[rank] / middle, KINDS[excess.index(max(excess))], totals[rank] - middle)


def persistent(window: Sequence[Own], seconds: Sequence[float]) -> Slow | None:
    """Return the persistently slow rank in these intervals, at most WINDOW; `seconds`: their durations."""
    if len(window) < SLOWEST:
        return None
    means = [[fmean(parts) for parts in zip(*of_rank, strict=True)] for of_rank in zip(*window, strict=True)]
    found = slowest(means)
    if found is None or not found.matters(fmean(seconds)):
        return None
    times = sum(1 for each in map(slowest, window) if each and each.rank == found.rank)
    return found if times >= SLOWEST else None


class Stragglers:
    """The intervals of a run so far, the same on every rank because figures are gathered on all."""

    def __init__(self, nodes: Sequence[str]) -> None:
        """`nodes`: node name by rank. With fewer than two ranks, no rank is ever slow."""
        self._nodes = nodes
        self._window = deque[Own](maxlen=WINDOW)
        self._seconds = deque[float](maxlen=WINDOW)
        self._intervals = -1  # the first interval includes warm-up and does not count
        self._uneven: list[float] = []  # the ratios of intervals with a slow rank
        self._named: dict[
            int, tuple[int, Slow]
        ] = {}  # rank -> number of intervals in which it was slow, and the last one
        self.last: Slow | None = None  # the slowest rank of the last interval, by any margin
        self.now: Slow | None = None  # the persistently slow rank

    def add(self, own: Own, seconds: float) -> None:
        """Add an interval of `seconds`."""
        self._intervals += 1
        if len(self._nodes) < 2 or not self._intervals:
            return
        self._window.append(own)
        self._seconds.append(seconds)
        self.last, self.now = slowest(own), persistent(self._window, self._seconds)
        if self.last and self.last.matters(seconds):
            self._uneven.append(self.last.ratio)
        if self.now:
            times = self._named.get(self.now.rank, (0, self.now))[0]
            self._named[self.now.rank] = (times + 1, self.now)

    def name(self, slow: Slow) -> str:
        """Return `rank 5 on gpu-c is slow: its work takes 1.31x the median, mostly its data wait`."""
        why = f"its work takes {slow.ratio:.2f}x the median, mostly its {SHOWN.get(slow.kind, slow.kind)}"
        return f"rank {slow.rank} on {self._nodes[slow.rank]} is slow: {why}"

    def conclusion(self) -> str:
        """Return the summary at the end of a run; "" if no rank was slow or there are too few intervals."""
        counted = f"of {self._intervals} intervals"
        if 2 * len(self._named) > len(self._nodes):  # then none is slower than most
            ranks = " and ".join(f"rank {rank} in {times}" for rank, (times, _) in sorted(self._named.items())[:NAMED])
            return f"no rank is slow in the whole run: it was {ranks} {counted}, by turns"
        if self._named:
            often = sorted(self._named.values(), key=lambda named: -named[0])[:NAMED]
            return "; ".join(f"{self.name(slow)}, at the end of {times} {counted}" for times, slow in often)
        if self._intervals < WINDOW or 2 * len(self._uneven) < self._intervals:
            return ""
        return (
            f"the slowest rank takes {median(self._uneven):.2f}x the median in {len(self._uneven)} {counted}, but it "
            f"is not always the same rank: the data loader or the collective is the bottleneck"
        )
