"""Attribute slow pairs to a node if all of its pairs are slow in one direction, else to the pair. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from launcher.features.bench.health.outliers import FACTOR, far_above, far_below

Edge = tuple[str, str]  # from, to
SENDS, RECEIVES, ANSWERS = "sends", "receives", "latency"
PAIR_FACTOR = 1.5  # for one measurement among many pairs, or for two without any other to compare
LATENCY_FACTOR = 3.0
LOST_PACKETS = 0.02  # share of retransmitted TCP segments; a healthy network stays far below it
_SOME = 0.005  # minimum for a pair by chance, if all other pairs of the node lose packets
ENOUGH = 0.5  # of the negotiated link speed
_LEAST_LATENCY = 100.0  # us above the others; smaller differences are ignored


@dataclass(frozen=True)
class Slow:
    """nodes: the faulty node, or both nodes of a pair; empty: all. way: SENDS, RECEIVES or ANSWERS; "" for all nodes,
    and for a pair from the first node to the second. value: Gb/s, or us for a latency; others: the reference value.
    again: share of retransmitted segments.
    """

    nodes: tuple[str, ...]
    way: str
    value: float
    others: float
    edges: tuple[Edge, ...]
    again: float = 0.0


def lossy_links(again: Mapping[Edge, float], speeds: Mapping[Edge, float]) -> list[Slow]:
    """Return the links that lose packets. again: share of retransmitted TCP segments, by direction."""
    lossy = {edge for edge, share in again.items() if share >= LOST_PACKETS}
    found: list[Slow] = []

    def blame(nodes: tuple[str, ...], way: str, edges: Sequence[Edge]) -> None:
        others = [value for edge, value in speeds.items() if edge not in edges] or list(speeds.values())
        own = median(speeds[edge] for edge in edges)
        found.append(Slow(nodes, way, own, median(others), tuple(edges), median(again[edge] for edge in edges)))

    nodes = sorted({node for edge in again for node in edge})
    if len(nodes) > 2 and 2 * len(lossy) > len(again):
        blame((), "", list(again))
        return found
    for node in nodes:
        for way, end in ((SENDS, 0), (RECEIVES, 1)):
            own = [edge for edge in again if edge[end] == node]
            # One of many pairs may have lost no packets by chance.
            some = sum(again[edge] >= _SOME for edge in own)
            if len(own) >= 2 and some >= len(own) - len(own) // 4 and median(again[e] for e in own) >= LOST_PACKETS:
                blame((node,), way, own)
                lossy -= set(own)
    for edge in sorted(lossy if len(nodes) == 2 else ()):  # one of many pairs may have lost packets by chance
        blame(edge, "", [edge])
    return found


def slow_links(speeds: Mapping[Edge, float], latencies: Mapping[Edge, float]) -> list[Slow]:
    """speeds: Gb/s in each direction; latencies: us of each pair. With two nodes, only a difference can be detected."""
    nodes = sorted({node for edge in (*speeds, *latencies) for node in edge})
    found: list[Slow] = []
    while True:  # slowest first; pairs that it explains are not attributed to other nodes
        explained = {edge for each in found for edge in each.edges}
        left = {edge: value for edge, value in speeds.items() if edge not in explained}
        blamed = {(each.nodes[0], each.way) for each in found}
        candidates = [each for each in _nodes(nodes, left) if (each.nodes[0], each.way) not in blamed]
        if not candidates:
            break
        found.append(min(candidates, key=lambda each: each.value / each.others))
    found += _pairs(left)
    known = {node for each in found for node in each.nodes}
    return found + [each for each in _slow_answers(nodes, latencies) if each.nodes[0] not in known]


def _nodes(nodes: Sequence[str], speeds: Mapping[Edge, float]) -> Iterator[Slow]:
    for node in nodes:
        others = [value for edge, value in speeds.items() if node not in edge]
        for way, end in ((SENDS, 0), (RECEIVES, 1)):
            own = {edge: value for edge, value in speeds.items() if edge[end] == node}
            if len(own) >= 2 and len(others) >= 2 and _all_below(list(own.values()), others):
                yield Slow((node,), way, median(own.values()), median(others), tuple(own))


def _all_below(own: Sequence[float], others: Sequence[float]) -> bool:
    """One of many values may be better than the rest by chance."""
    best = sorted(own)[-1 if len(own) < 4 else -2]
    return best * FACTOR <= median(others) and far_below(median(own), others)


def _pairs(speeds: Mapping[Edge, float]) -> Iterator[Slow]:
    for edge, value in speeds.items():
        others = [other for name, other in speeds.items() if name != edge]
        if (len(others) >= 4 and far_below(value, others, PAIR_FACTOR)) or (
            len(others) == 1 and value * PAIR_FACTOR <= others[0]
        ):
            yield Slow(edge, "", value, median(others), (edge,))


def _slow_answers(nodes: Sequence[str], latencies: Mapping[Edge, float]) -> Iterator[Slow]:
    for node in nodes:
        own = {edge: value for edge, value in latencies.items() if node in edge}
        others = [value for edge, value in latencies.items() if node not in edge]
        if len(own) >= 2 and len(others) >= 2 and min(own.values()) > median(others) + _LEAST_LATENCY:
            least = sorted(own.values())[0 if len(own) < 4 else 1]
            if least >= LATENCY_FACTOR * median(others) and far_above(median(own.values()), others, LATENCY_FACTOR):
                yield Slow((node,), ANSWERS, median(own.values()), median(others), tuple(own))


def below_negotiated(speeds: Mapping[Edge, float], negotiated: Mapping[str, float]) -> tuple[float, float] | None:
    """If the whole cluster is slow, return the median speeds of its pairs and of their negotiated links in Gb/s.

    negotiated: by node, only for links that report it.
    """
    known = {edge: min(negotiated[node] for node in edge) for edge in speeds if all(n in negotiated for n in edge)}
    if not known or median(speeds[edge] / most for edge, most in known.items()) >= ENOUGH:
        return None
    return median(speeds[edge] for edge in known), median(known.values())
