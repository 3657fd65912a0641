"""How fast several nodes will train, from their measured links and the bytes of the gradients. Pure.

Data parallel training: the gradients of each step are summed over all workers by a ring all-reduce, which overlaps with
the backward pass. The formula and its sources: docs/bench.md, "Forecast"; how right it is: bench/forecast.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import median

from launcher.features.bench.health.measures import BANDWIDTH, GRADIENTS, LATENCY, PASSES, STEP, TRAINED, Measure
from launcher.features.bench.health.verdict import figure
from launcher.model.sizes import size_text

BUCKET = 25 << 20  # bytes that DistributedDataParallel sums at once (bucket_cap_mb)
FORWARD = 1 / 3  # share of a step: the backward pass computes two products for each one of the forward pass
WORTH = 0.5  # share of the speed of N independent nodes that accumulated steps should reach
MOST_DOUBLED = 11  # 1,024 times as many passes
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True)
class TrainingStep:
    """A step. gradients: bytes. alone: its seconds on one node, if known. passes: forward and backward passes in it,
    after the last of which the gradients are summed. workers: of a node.
    """

    gradients: float
    alone: float | None = None
    passes: int = 1
    workers: int = 1


@dataclass(frozen=True)
class Forecast:
    """Steps on the first `nodes` nodes. link, bandwidth (Gb/s): the slowest of their ring. Speeds: multiples of one
    node's, in samples per second.
    """

    nodes: int
    link: tuple[str, str]
    bandwidth: float
    reduction: float  # seconds of the sum of all gradients, by itself
    least: float  # seconds of a step on one node from which these nodes are faster than one
    step: float | None = None  # seconds
    speed: float | None = None
    passes: int | None = None  # in a step, with which these nodes are worth it; None: they are, or no number helps
    accumulated: float | None = None  # the speed with so many


def reduction(gradients: float, workers: int, bandwidth: float, latency: float) -> float:
    """Return the seconds of a ring all-reduce: 2 (W - 1) messages of 1 / W of the bytes, one after another.

    bandwidth: bytes per second of the slowest link; latency: seconds of a message.
    """
    return 2 * (workers - 1) * (latency + gradients / workers / bandwidth)


def buckets(work: TrainingStep, nodes: int, bandwidth: float, latency: float) -> tuple[int, float]:
    """Return the number of buckets of gradients, and the seconds of the all-reduce of one; all have the same size."""
    count = max(ceil(work.gradients / BUCKET), 1)
    return count, reduction(work.gradients / count, nodes * work.workers, bandwidth, latency)


def step(alone: float, passes: int, count: int, bucket: float) -> float:
    """Return the seconds of a step whose last backward pass overlaps with `count` all-reduces of `bucket` seconds.

    The buckets get ready evenly during that pass and are reduced one after another, so that either the first one's
    start or the last one's decides.
    """
    backward = alone / passes * (1 - FORWARD)
    return alone - backward + max(backward / count + count * bucket, backward + bucket)


def least(nodes: int, passes: int, count: int, bucket: float) -> float:
    """Return the seconds of a step on one node from which `nodes` nodes are faster: step(alone) < nodes * alone."""
    overlapped = (1 - FORWARD) / passes * (1 - 1 / count)
    return max(count * bucket / (nodes - 1 + overlapped), bucket / (nodes - 1))


def forecasts(names: Sequence[str], measures: Sequence[Measure], work: TrainingStep) -> tuple[Forecast, ...]:
    """Return the forecasts for the first 2, 4, 8, ... and for all nodes; none where no link between them was measured.

    names: the nodes by rank. The links are those of the ring in the order of the ranks.
    """
    speeds = {(each.node, each.to): each.value for each in measures if each.kind == BANDWIDTH and each.value > 0}
    latencies = [each.value * 1e-6 for each in measures if each.kind == LATENCY and each.value >= 0]
    latency = median(latencies) if latencies else 0.0
    found = []
    for nodes in sorted({len(names), *(1 << power for power in range(1, len(names).bit_length()))} - {0, 1}):
        ring = [(names[rank], names[(rank + 1) % nodes]) for rank in range(nodes)]
        if seen := {link: speeds[link] for link in ring if link in speeds}:
            link = min(seen, key=lambda each: seen[each])
            found.append(_forecast(work, nodes, link, seen[link], latency))
    return tuple(found)


def _forecast(work: TrainingStep, nodes: int, link: tuple[str, str], gigabits: float, latency: float) -> Forecast:
    bandwidth = gigabits * 1e9 / 8
    count, bucket = buckets(work, nodes, bandwidth, latency)
    summed = reduction(work.gradients, nodes * work.workers, bandwidth, latency)
    base = Forecast(nodes, link, gigabits, summed, least(nodes, work.passes, count, bucket))
    alone = work.alone
    if alone is None:
        return base

    def speed(times: int) -> float:
        """Return the speed with `times` as many passes in a step."""
        return nodes * alone * times / step(alone * times, work.passes * times, count, bucket)

    took = step(alone, work.passes, count, bucket)
    times = next((1 << power for power in range(MOST_DOUBLED) if speed(1 << power) >= WORTH * nodes), 1)
    more = (work.passes * times, speed(times)) if times > 1 else (None, None)
    return replace(base, step=took, speed=speed(1), passes=more[0], accumulated=more[1])


def work_of(
    measures: Sequence[Measure], gradients: float | None, alone: float | None, workers: int
) -> TrainingStep | None:
    """Return a step as given, else as measured of the trainer's model: that of the slowest node. None: unknown."""
    known = [each for each in measures if each.value > 0]
    seen = {kind: max((each.value for each in known if each.kind == kind), default=None) for kind in TRAINED}
    size = gradients if gradients is not None else seen[GRADIENTS]
    if size is None:
        return None
    passes = int(seen[PASSES] or 1) if alone is None else 1
    return TrainingStep(size, seen[STEP] if alone is None else alone, passes, workers)


def lines(found: Sequence[Forecast], work: TrainingStep) -> Iterator[str]:
    """Yield the speed for each number of nodes; and if all of them are not worth it, why and what helps."""
    size = size_text(work.gradients)
    if work.alone is None:
        for each in found:
            then = f"{each.nodes} nodes are faster than one if its steps take more than {seconds_text(each.least)}"
            yield f"{_needs(each, size)}: {then} (--step SECONDS)"
        return
    own = seconds_text(work.alone)
    if found:
        speeds = [f"{each.nodes} nodes: {_times(each.speed)}{' of one' * (each is found[0])}" for each in found]
        yield f"{'; '.join(speeds)} ({size} of gradients, steps of {own} on one node)"
    for each in found[-1:]:
        if each.speed is None or each.speed >= WORTH * each.nodes:
            continue
        verdict = "slower than one machine" if each.speed < 1 else f"{_times(each.speed)} of one machine"
        more = f"accumulate {each.passes} steps ({_times(each.accumulated)}), or " if each.passes else ""
        yield f"{_needs(each, size)}, the step itself {own}: {verdict} -> {more}a faster link"


def _needs(each: Forecast, size: str) -> str:
    link = f"{' to '.join(each.link)} {figure(each.bandwidth)} Gb/s"
    return f"{link}: {size} of gradients need {seconds_text(each.reduction)} a step"


def seconds_text(seconds: float) -> str:
    """Return `9.2 s`, `0.31 s`, `12 ms`."""
    if seconds < 0.0995:  # two digits, not 1e+02
        return f"{seconds * 1000:.2g} ms"
    return f"{seconds:.2g} s" if seconds < 99.5 else f"{seconds:.0f} s"


def _times(speed: float | None) -> str:
    return "<0.1x" if (speed or 0) < 0.05 else f"{speed:.1f}x"


def gradient_bytes(text: str) -> float:
    """Return bytes from `102M`, `1.5 GB` (powers of 1000) or a number of bytes. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip()) if len(text) < 40 else None
    size = float(found[1]) * _UNITS[found[2].lower()] if found else 0.0
    if not 1 <= size <= 1e15:
        raise ValueError(f"expected a size such as 102M or 1.5G, not {text}")
    return size
