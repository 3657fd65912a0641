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

from launcher.features.bench.health.measures import (
    BANDWIDTH,
    COMPRESSION,
    GRADIENTS,
    LATENCY,
    PASSES,
    SENT,
    STEP,
    TRAINED,
    Measure,
)
from launcher.features.bench.health.verdict import figure
from launcher.model.sizes import size_text

BUCKET = 25 << 20  # bytes that DistributedDataParallel sums at once (bucket_cap_mb)
FORWARD = 1 / 3  # share of a step: the backward pass computes two products for each one of the forward pass
WORTH = 0.8  # share of the speed of N independent nodes that is worth having N
MOST_DOUBLED = 11  # 1,024 times as many passes
SLOW = 1.3  # factor by which a ring or a step is faster without a slow node
GAIN = 1.05  # factor by which fewer nodes must be faster than all
LARGER = 4  # times the batch, above which that is a larger change of the training than compressed gradients
MESSAGES = 3  # of powersgd for each bucket: what is not compressed, and two matrices
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)b?", re.IGNORECASE)
_WAY = re.compile(r"bf16|powersgd:[1-9]\d{0,3}")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@dataclass(frozen=True)
class Compressed:
    """Gradients as --gradient-compression `name` of the trainer sends them: bytes, and the seconds that it computes."""

    name: str
    bytes: float
    seconds: float


@dataclass(frozen=True)
class TrainingStep:
    """A step. gradients: bytes. alone: its seconds on one node, if known. passes: forward and backward passes in it,
    after the last of which the gradients are summed. workers: of a node. compressed: what is known of the trainer's
    model. compression: the name of the one that the job has.
    """

    gradients: float
    alone: float | None = None
    passes: int = 1
    workers: int = 1
    compressed: tuple[Compressed, ...] = ()
    compression: str = ""


@dataclass(frozen=True)
class Way:
    """A way to sum the gradients. bytes: of a step. step: seconds. speed: see Forecast. option: of the trainer, as a
    key and value of run.args; "" to change nothing. change: how much the training changes, to compare ways.
    """

    name: str
    bytes: float
    step: float
    speed: float
    option: str = ""
    change: float = 0


@dataclass(frozen=True)
class Forecast:
    """Steps on the first `nodes` nodes. link, bandwidth (Gb/s): the slowest of their ring. Speeds: multiples of one
    node's, in samples per second. ways: the first is plain; `step` and `speed` are those of the job's own. without: of
    all nodes but this one, without which they are faster.
    """

    nodes: int
    link: tuple[str, str]
    bandwidth: float
    reduction: float  # seconds of the sum of all gradients, by itself
    least: float  # seconds of a step on one node from which these nodes are faster than one
    step: float | None = None  # seconds
    speed: float | None = None
    enough: float | None = None  # bytes of gradients, with which these nodes are worth it whatever overlaps
    ways: tuple[Way, ...] = ()
    without: str = ""

    @property
    def smallest(self) -> Way | None:
        """The way that changes the training least, of those with which these nodes are worth it."""
        worth = [way for way in self.ways if way.speed >= WORTH * self.nodes]
        return min(worth, key=lambda way: way.change, default=None)


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
    The last one may be of all but a slow node.

    names: the nodes by rank. The links are those of the ring in the order of the ranks.
    """
    found = _forecasts(names, measures, work)
    every = found[-1] if found else None
    if every is None or every.speed is None or work.alone is None or every.nodes != len(names) or len(names) < 3:
        return found
    steps = {each.node: each.value for each in measures if each.kind == STEP and each.value > 0}
    steps = steps if work.alone in steps.values() else {}  # else the user has given the time of a step
    fewer = list[Forecast]()
    for name in names:
        alone = max((steps[each] for each in steps if each != name), default=work.alone)
        rest = _forecasts([each for each in names if each != name], measures, replace(work, alone=alone))[-1:]
        for each in rest:
            slow = each.bandwidth >= SLOW * every.bandwidth or work.alone >= SLOW * alone
            speed = (each.speed or 0.0) * work.alone / alone  # of the node whose step was the longest
            if slow and each.nodes == len(names) - 1 and speed > GAIN * every.speed:
                fewer.append(replace(each, speed=speed, without=name))
    return (*found, *sorted(fewer, key=lambda each: each.speed or 0.0)[-1:])


def _forecasts(names: Sequence[str], measures: Sequence[Measure], work: TrainingStep) -> tuple[Forecast, ...]:
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
    if work.alone is None:
        return base
    found = tuple(ways(work, nodes, bandwidth, latency))
    enough = _bytes_within((1 / WORTH - 1) * work.alone, nodes * work.workers, bandwidth, latency)
    own = next((way for way in found if way.name == work.compression), found[0])
    return replace(base, step=own.step, speed=own.speed, enough=enough, ways=found)


def ways(work: TrainingStep, nodes: int, bandwidth: float, latency: float) -> Iterator[Way]:
    """Yield the ways to sum the gradients of a step whose time on one node is known.

    Accumulated steps are the fewest, by doubling, with which the nodes are worth it; none if no number is. powersgd
    overlaps with nothing, as it waits for each bucket; its ranks are known for the trainer's model only.
    """
    alone, workers = work.alone, nodes * work.workers
    assert alone is not None
    count, bucket = buckets(work, nodes, bandwidth, latency)
    known = {each.name: each for each in work.compressed}

    def way(name: str, size: float, seconds: float, option: str = "", change: float = 0, times: int = 1) -> Way:
        return Way(name, size, seconds, nodes * times * alone / seconds, option, change)

    yield way("plain", work.gradients, step(alone, work.passes, count, bucket))
    half = known.get("bf16", Compressed("bf16", work.gradients / 2, 0.0))
    short = reduction(half.bytes / count, workers, bandwidth, latency)
    took = step(alone, work.passes, count, short) + half.seconds
    yield way("bf16", half.bytes, took, "gradient_compression: bf16", 1)
    for times in (1 << power for power in range(1, MOST_DOUBLED)):
        passes = work.passes * times
        took = step(alone * times, passes, count, bucket)
        if times * alone / took >= WORTH:
            change = 2 if times <= LARGER else 5
            yield way(f"accumulate {passes}", work.gradients, took, f"accumulate: {passes}", change, times)
            break
    for each in known.values():
        if each.name != half.name:
            waits = (MESSAGES * count - 1) * reduction(0, workers, bandwidth, latency)
            took = alone + each.seconds + waits + reduction(each.bytes, workers, bandwidth, latency)
            rank = int(each.name.rpartition(":")[2])  # the higher it is, the less is lost
            yield way(each.name, each.bytes, took, f"gradient_compression: {each.name}", 3 + 1 / rank)


def _bytes_within(seconds: float, workers: int, bandwidth: float, latency: float) -> float:
    """Return the bytes that a ring all-reduce sums in so many seconds: the inverse of `reduction`."""
    return max(seconds / 2 / (workers - 1) - latency, 0.0) * workers * bandwidth


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
    compressed = _compressed(measures) if gradients is None else ()
    return TrainingStep(size, seen[STEP] if alone is None else alone, passes, workers, compressed)


def _compressed(measures: Sequence[Measure]) -> tuple[Compressed, ...]:
    """Return what was measured of the ways to compress the gradients of the trainer's model, on the slowest node."""
    names = dict.fromkeys(each.of for each in measures if each.kind == SENT and _WAY.fullmatch(each.of))

    def largest(kind: str, name: str) -> float:
        return max((each.value for each in measures if (each.kind, each.of) == (kind, name)), default=-1.0)

    every = [Compressed(name, largest(SENT, name), largest(COMPRESSION, name)) for name in names]
    return tuple(each for each in every if each.bytes > 0 and each.seconds >= 0)


def lines(found: Sequence[Forecast], work: TrainingStep) -> Iterator[str]:
    """Yield the speed for each number of nodes; and if all of them are not worth it, why and what helps."""
    size = size_text(work.gradients)
    less = [each for each in found if each.without]
    found = found[: len(found) - len(less)]
    if work.alone is None:
        for each in found:
            then = f"{each.nodes} nodes are faster than one if its steps take more than {seconds_text(each.least)}"
            yield f"{_needs(each, size)}: {then} (--step SECONDS)"
        return
    own, sent = seconds_text(work.alone), f", sent as {work.compression}" if work.compression else ""
    if found:
        speeds = [f"{each.nodes} nodes: {_times(each.speed)}{' of one' * (each is found[0])}" for each in found]
        yield f"{'; '.join(speeds)} ({size} of gradients{sent}, steps of {own} on one node)"
    for each in found[-1:]:
        if each.speed is not None and each.speed < WORTH * each.nodes:
            verdict = "slower than one machine" if each.speed < 1 else f"{_times(each.speed)} of one machine"
            yield f"{_needs(each, size)}, the step itself {own}: {verdict}"
            for way in each.ways:
                yield (
                    f"  {way.name:<15} {size_text(way.bytes):>8} a step, which takes {seconds_text(way.step):>7}: "
                    f"{_times(way.speed):>5} of one"
                )
            yield f"-> {_advice(each, bool(work.compressed))}"
    for each in less:
        speed = f"{each.nodes} nodes without {each.without}: {_times(each.speed)} of one"
        yield f"-> {speed}, more than with it: leave it out of `nodes` until the slow part is mended"


def _advice(each: Forecast, trainer: bool) -> str:
    """Return what to change. trainer: its options are known, and those of a program are not."""
    best, goal = each.smallest, f"{_times(WORTH * each.nodes)} of one"
    if best is not None and trainer:
        change = f"{best.option} in run.args: the smallest change that brings {goal}"
        return f"{change} (what it changes: docs/slow-links.md), or a faster link"
    if best is not None:
        own = f"; a way of your own brings it with {size_text(each.enough or 0)} a step"
        return f"{best.name} is the smallest change that brings {goal}{own}; or a faster link"
    fastest = max(each.ways, key=lambda way: way.speed)
    most = f"{fastest.option} in run.args" if trainer and fastest.option else fastest.name
    return f"none of these brings {goal} (most: {most}, {_times(fastest.speed)}): a faster link"


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
