"""What the measures of a bench say: which part of which node is slow, why, and what to do. Pure.

Like parts are compared: GPUs of one model, processors with as many threads, the same mount. Of two parts that differ
neither is blamed, unless one reaches its known peak and the other does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median

from launcher.health import links, outliers
from launcher.health.links import Slow
from launcher.health.measures import BANDWIDTH, LATENCY, Measure, Said
from launcher.health.peaks import REACHED, peak
from launcher.health.trouble import Trouble, plain

DIFFER = 1.5  # factor between two parts that have nothing else to be compared with
FACTOR_READING, DIFFER_READING = 1.5, 2.0  # storage is shared more often than not
BOTH = (links.SENDS, links.RECEIVES)
_FIXES = {
    "GPU": "look at nvidia-smi -q -d PERFORMANCE,CLOCK there",
    "processor": "see what else runs there (top), its CPU limit and its frequency governor",
    "link": "look at its cable and switch port, and at ethtool and ip -s link there",
    "path": "look at iostat -x 1 there while it is read",
    "failed": "look at the node's own log: dmesg",
}
_NEITHER = "two alone do not tell which one is at fault"


@dataclass(frozen=True)
class Finding:
    """Something odd. nodes: the one to blame; two, the slower one or the sender first, where neither is blamed.

    kinds: of the table's columns that it is about. what: the measure and what it is compared with.
    """

    nodes: tuple[str, ...]
    part: str
    kinds: tuple[str, ...]
    what: str
    cause: str = ""
    fix: str = ""

    @property
    def line(self) -> str:
        """`gpu-c GPU 3: 212 TFLOP/s, the others 301 (0.70): throttled; check its cooling`."""
        told = ": ".join(text for text in (self.what, self.cause) if text)
        return f"{' -> '.join(self.nodes)} {self.part}: {told}{'; ' if self.fix else ''}{self.fix}"


@dataclass(frozen=True)
class Network:
    """What is known of the nodes' links, each by the node's name."""

    interfaces: Mapping[str, str] = field(default_factory=dict)
    negotiated: Mapping[str, float] = field(default_factory=dict)  # Gb/s, where a link tells it


def judge(
    said: Sequence[Said], troubles: Sequence[Trouble], network: Network, lost: Mapping[str, str]
) -> list[Finding]:
    """All that is odd, the nodes that were lost first. lost: why, by node."""
    measures = [measure for each in said for measure in each.measures]
    others = "the others were judged"
    found = [Finding((node,), "node", (), f"lost: {plain(why, 160)}", "", others) for node, why in lost.items()]
    parts = _parts(measures)
    # A processor that is slow moves its node's data slowly, too.
    excused = {each.nodes[0] for each in parts if each.part == "processor" and len(each.nodes) == 1}
    found += [each for each in parts if each.part == "processor" or not excused & set(each.nodes)]
    slow = [each for each in _links(measures, network) if not excused & set(each.nodes)]
    found += slow
    found += _failures(said, {*lost, *excused, *(node for each in slow for node in each.nodes)})
    explained = [_explained(each, troubles) for each in found]
    used = {trouble for each in explained for trouble in _matching(each, troubles)}
    told = [Finding((t.node,), t.part, (), t.what, "", t.fix) for t in troubles if t not in used]
    return explained + told


def _failures(said: Sequence[Said], known: Set[str]) -> Iterator[Finding]:
    """What could not be measured; a pair once, a node without any pair instead of its pairs. known: nodes at fault."""
    pairs: dict[tuple[str, str], str] = {}
    for each in said:
        for _, to, why in each.failed:
            if to:
                pairs.setdefault((min(each.node, to), max(each.node, to)), why)
    for each in said:
        for part, to, why in each.failed:
            first_is_lost = part == "meeting" and said[0].node in known
            if not to and each.node not in known and not (first_is_lost or (part == "all-reduce" and (known or pairs))):
                yield Finding((each.node,), part, (), f"failed: {plain(why, 160)}", "", _FIXES["failed"])
    good = {node for each in said for m in each.measures if m.kind == BANDWIDTH for node in (m.node, m.to)}
    alone = {node for pair in pairs for node in pair if sum(node in other for other in pairs) > 1} - good
    for node in sorted(alone - known):
        why = next(why for pair, why in pairs.items() if node in pair)
        what = f"no other node could be measured with it: {_words(why)}"
        yield Finding((node,), "link", (), what, "", _FIXES["link"])
    for pair, why in pairs.items():
        if not {*alone, *known} & set(pair):
            yield Finding(pair, "link", (), f"failed: {_words(why)}", "", _FIXES["link"])


def _words(why: str) -> str:
    """Of gloo's and NCCL's messages, which name their source files."""
    short = {"timed out": "no answer in time", "closed": "the connection was closed", "refused": "connection refused"}
    return next((text for word, text in short.items() if word in why.lower()), plain(why, 160))


def _parts(measures: Sequence[Measure]) -> list[Finding]:
    """Of GPUs, processors and mounts: one finding a part."""
    found: list[Finding] = []

    def group(measure: Measure) -> tuple[str, ...]:
        return measure.kind, measure.of, measure.unit, measure.precision

    alone = sorted((measure for measure in measures if measure.part and not measure.to), key=group)
    for _, members in groupby(alone, group):
        found += _of_group(list(members))
    merged: dict[tuple[tuple[str, ...], str], Finding] = {}
    for each in found:
        key = (each.nodes, each.part)
        if key in merged:
            first = merged[key]
            each = replace(first, kinds=(*first.kinds, *each.kinds), what=f"{first.what}; {each.what}")  # noqa: PLW2901
        merged[key] = each
    return list(merged.values())


def _of_group(alike: Sequence[Measure]) -> Iterator[Finding]:
    values = {(measure.node, measure.part): measure for measure in alike}
    factor = FACTOR_READING if alike[0].kind == "read" else outliers.FACTOR
    for key in outliers.slow({key: measure.value for key, measure in values.items()}, factor):
        others = median(measure.value for name, measure in values.items() if name != key)
        yield _slower(values[key], f"the others {figure(others)}", others)
    most = peak(alike[0].of, alike[0].precision) if alike[0].kind == "matmul" else None
    if most and median(measure.value for measure in alike) < REACHED * most:
        nodes = tuple(dict.fromkeys(measure.node for measure in alike))
        value = median(measure.value for measure in alike)
        what = f"{_told(alike[0], value)}, its data sheet says {figure(most)} ({value / most:.2f})"
        name = nodes if len(nodes) == 1 else ("all",)
        yield Finding(name, f"{plain(alike[0].of)}", (alike[0].kind,), what, "", _FIXES["GPU"])
    elif len(values) == 2:
        low, high = sorted(values.values(), key=lambda measure: measure.value)
        if most and low.value < REACHED * most:
            yield _slower(low, f"its data sheet says {figure(most)}", most)
        elif low.value * (DIFFER_READING if low.kind == "read" else DIFFER) <= high.value:
            what = f"{_told(low, low.value)} on {low.node}, {figure(high.value)} on {high.node}"
            nodes = (low.node, high.node) if low.node != high.node else (low.node,)
            part = low.part if low.part == high.part else f"{low.part} and {high.part}"
            yield Finding(nodes, part, (low.kind,), f"{what} ({low.value / high.value:.2f})", _NEITHER, _fix(low.part))


def _slower(measure: Measure, than: str, others: float) -> Finding:
    what = f"{_told(measure, measure.value)}, {than} ({measure.value / others:.2f})"
    return Finding((measure.node,), measure.part, (measure.kind,), what, "", _fix(measure.part))


def _told(measure: Measure, value: float) -> str:
    kind = {"matmul": "", "read": "reads "}.get(measure.kind, f"{measure.kind} ")
    return f"{kind}{figure(value)} {measure.unit}"


def _fix(part: str) -> str:
    return _FIXES["path" if part.startswith("/") else "GPU" if part.startswith("GPU") else "processor"]


def _links(measures: Sequence[Measure], network: Network) -> list[Finding]:
    pairs = {(m.node, m.to): m for m in measures if m.kind == BANDWIDTH}
    speeds = {edge: measure.value for edge, measure in pairs.items()}
    latencies = {(m.node, m.to): m.value for m in measures if m.kind == LATENCY}
    lossy = links.lossy_links({edge: measure.again for edge, measure in pairs.items()}, speeds)
    # Lost packets make a link slow in the other direction, too, as its answers are lost.
    touched = {node for each in lossy for node in each.nodes}
    slow = [each for each in links.slow_links(speeds, latencies) if not touched & set(each.nodes)]
    found = [_slow_link(each, network, alone=len(speeds) == 2) for each in (*lossy, *slow)]
    if not found and (seen := links.below_negotiated(speeds, network.negotiated)) is not None:
        value, most = seen
        what = f"{figure(value)} Gb/s between two nodes, their links have negotiated {figure(most)}"
        found.append(Finding(("all",), "links", BOTH, f"{what} ({value / most:.2f})", "", _FIXES["link"]))
    return found


def _slow_link(each: Slow, network: Network, *, alone: bool) -> Finding:
    cause = f"packets are lost, {100 * each.again:.0f} % of the TCP segments were sent again" if each.again else ""
    than = f"{figure(each.others)} ({each.value / each.others:.2f})"
    if not each.nodes:
        return Finding(("all",), "links", BOTH, f"{figure(each.value)} Gb/s", cause, _FIXES["link"])
    interface = f"link {network.interfaces.get(each.nodes[0], '')}".strip()
    if each.way == links.ANSWERS:
        what = f"a message takes {figure(each.value)} us, between the others {figure(each.others)}"
        return Finding(each.nodes, interface, (links.ANSWERS,), what, cause, _FIXES["link"])
    if each.way:
        what = f"{each.way} {figure(each.value)} Gb/s, the others {than}"
        return Finding(each.nodes, interface, (each.way,), what, cause, _FIXES["link"])
    what = f"{figure(each.value)} Gb/s, {'the other way' if alone else 'other pairs'} {than}"
    return Finding(each.nodes, "link", ("pair",), what, cause, _FIXES["link"])


def _matching(found: Finding, troubles: Sequence[Trouble]) -> list[Trouble]:
    """What the machine says of this part, or of any of its links."""
    of_link = ("link", "InfiniBand")
    return [
        trouble
        for trouble in troubles
        if trouble.node in found.nodes
        and (trouble.part == found.part or (found.part.startswith("link") and trouble.part.startswith(of_link)))
    ]


def _explained(found: Finding, troubles: Sequence[Trouble]) -> Finding:
    matching = _matching(found, troubles)
    if not matching:
        return found
    cause = ", ".join([*([found.cause] if found.cause else []), *(trouble.what for trouble in matching)])
    return replace(found, cause=cause, fix=matching[0].fix)


def figure(value: float) -> str:
    """Three digits, as many as a measure has."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
