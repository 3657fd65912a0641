"""Evaluate the measurements of a benchmark: find slow components, their causes and fixes. Pure.

Comparable parts are compared: GPUs of one model, processors with the same number of threads, the same mount. Of only
two parts, neither is blamed unless one reaches its known peak and the other does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median

from launcher.features.bench.health import links, outliers
from launcher.features.bench.health.links import Slow
from launcher.features.bench.health.measures import BANDWIDTH, HANGS, LATENCY, Measure, NodeReport
from launcher.features.bench.health.peaks import REACHED, peak
from launcher.features.bench.health.problem import HealthProblem, plain

DIFFER = 1.5  # factor between two parts without any other to compare
FACTOR_READING, DIFFER_READING = 1.5, 2.0  # storage is often shared
BOTH = (links.SENDS, links.RECEIVES)
_FIXES = {
    "GPU": "check on the node: nvidia-smi -q -d PERFORMANCE,CLOCK",
    "processor": "check other processes (top), the CPU limit and the frequency governor",
    "link": "check its cable and switch port, and the output of ethtool and ip -s link on the node",
    "path": "check on the node while it is read: iostat -x 1",
    "failed": "check the node's kernel log: dmesg",
    "hangs": "train without such copies: env: {NCCL_P2P_DISABLE: 1}; or disable ACS and the IOMMU in the BIOS",
}
_NEITHER = "two values are not enough to identify the faulty one"


@dataclass(frozen=True)
class Finding:
    """An outlier or a failure. nodes: the faulty node; or two if undecided, the slower one or the sender first.

    kinds: the affected columns of the table. what: the measured value and the reference. undecided: of two values, one
    is worse, and nothing tells whose fault that is.
    """

    nodes: tuple[str, ...]
    part: str
    kinds: tuple[str, ...]
    what: str
    cause: str = ""
    fix: str = ""
    undecided: bool = False

    @property
    def line(self) -> str:
        """`gpu-c GPU 3: 212 TFLOP/s, others 301 (0.70): throttled; check its cooling`."""
        description = ": ".join(text for text in (self.what, self.cause) if text)
        return f"{' -> '.join(self.nodes)} {self.part}: {description}{'; ' if self.fix else ''}{self.fix}"


@dataclass(frozen=True)
class Network:
    """Known properties of the nodes' links, by node name."""

    interfaces: Mapping[str, str] = field(default_factory=dict)
    negotiated: Mapping[str, float] = field(default_factory=dict)  # Gb/s, for links that report it


def judge(
    reports: Sequence[NodeReport], problems: Sequence[HealthProblem], network: Network, lost: Mapping[str, str]
) -> list[Finding]:
    """Return all findings, lost nodes first. lost: reason by node."""
    measures = [measure for each in reports for measure in each.measures]
    others = "the other nodes were evaluated"
    found = [Finding((node,), "node", (), f"lost: {plain(why, 160)}", "", others) for node, why in lost.items()]
    parts = _parts(measures)
    # A slow processor also slows down the network transfers of its node.
    excused = {each.nodes[0] for each in parts if each.part == "processor" and len(each.nodes) == 1}
    found += [each for each in parts if each.part == "processor" or not excused & set(each.nodes)]
    slow = [each for each in _links(measures, network) if not excused & set(each.nodes)]
    found += slow
    found += _failures(reports, {*lost, *excused, *(node for each in slow for node in each.nodes)})
    explained = [_explained(each, problems) for each in found]
    used = {problem for each in explained for problem in _matching(each, problems)}
    other = [Finding((p.node,), p.part, (), p.what, "", p.fix) for p in problems if p not in used]
    return explained + other


def _failures(reports: Sequence[NodeReport], known: Set[str]) -> Iterator[Finding]:
    """Yield failed measurements: each pair once, or the node if all its pairs failed. known: nodes already reported."""
    pairs: dict[tuple[str, str], str] = {}
    hung = {each.node: failed for each in reports for failed in each.failed if failed[2].endswith(HANGS)}
    for node, (part, _, why) in hung.items():
        yield Finding((node,), part, ("peer",), plain(why, 160), "", _FIXES["hangs"])
    known = known | set(hung)  # its pairs waited for it
    for each in reports:
        for _, to, why in each.failed:
            if to:
                pairs.setdefault((min(each.node, to), max(each.node, to)), why)
    for each in reports:
        for part, to, why in each.failed:
            first_is_lost = part == "meeting" and reports[0].node in known
            if not to and each.node not in known and not (first_is_lost or (part == "all-reduce" and (known or pairs))):
                yield Finding((each.node,), part, (), f"failed: {plain(why, 160)}", "", _FIXES["failed"])
    good = {node for each in reports for m in each.measures if m.kind == BANDWIDTH for node in (m.node, m.to)}
    alone = {node for pair in pairs for node in pair if sum(node in other for other in pairs) > 1} - good
    for node in sorted(alone - known):
        why = next(why for pair, why in pairs.items() if node in pair)
        what = f"measurements with all other nodes failed: {_reason(why)}"
        yield Finding((node,), "link", (), what, "", _FIXES["link"])
    for pair, why in pairs.items():
        if not {*alone, *known} & set(pair):
            yield Finding(pair, "link", (), f"failed: {_reason(why)}", "", _FIXES["link"])


def _reason(why: str) -> str:
    """Shorten messages of gloo and NCCL, which contain names of their source files."""
    short = {"timed out": "timed out", "closed": "the connection was closed", "refused": "connection refused"}
    return next((text for pattern, text in short.items() if pattern in why.lower()), plain(why, 160))


def _parts(measures: Sequence[Measure]) -> list[Finding]:
    """Return findings about GPUs, processors and mounts: one per part."""
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
            each = replace(  # noqa: PLW2901
                first,
                kinds=(*first.kinds, *each.kinds),
                what=f"{first.what}; {each.what}",
                undecided=first.undecided and each.undecided,
            )
        merged[key] = each
    return list(merged.values())


def _of_group(alike: Sequence[Measure]) -> Iterator[Finding]:
    values = {(measure.node, measure.part): measure for measure in alike}
    factor = FACTOR_READING if alike[0].kind == "read" else outliers.FACTOR
    for key in outliers.slow({key: measure.value for key, measure in values.items()}, factor):
        others = median(measure.value for name, measure in values.items() if name != key)
        yield _slower(values[key], f"others {figure(others)}", others)
    most = peak(alike[0].of, alike[0].precision) if alike[0].kind == "matmul" else None
    if most and median(measure.value for measure in alike) < REACHED * most:
        nodes = tuple(dict.fromkeys(measure.node for measure in alike))
        value = median(measure.value for measure in alike)
        what = f"{_formatted(alike[0], value)}, data sheet {figure(most)} ({value / most:.2f})"
        name = nodes if len(nodes) == 1 else ("all",)
        yield Finding(name, f"{plain(alike[0].of)}", (alike[0].kind,), what, "", _FIXES["GPU"])
    elif len(values) == 2:
        low, high = sorted(values.values(), key=lambda measure: measure.value)
        if most and low.value < REACHED * most:
            yield _slower(low, f"data sheet {figure(most)}", most)
        elif low.value * (DIFFER_READING if low.kind == "read" else DIFFER) <= high.value:
            what = f"{_formatted(low, low.value)} on {low.node}, {figure(high.value)} on {high.node}"
            nodes = (low.node, high.node) if low.node != high.node else (low.node,)
            part = low.part if low.part == high.part else f"{low.part} and {high.part}"
            what = f"{what} ({low.value / high.value:.2f})"
            yield Finding(nodes, part, (low.kind,), what, _NEITHER, _fix(low.part), undecided=True)


def _slower(measure: Measure, than: str, others: float) -> Finding:
    what = f"{_formatted(measure, measure.value)}, {than} ({measure.value / others:.2f})"
    return Finding((measure.node,), measure.part, (measure.kind,), what, "", _fix(measure.part))


def _formatted(measure: Measure, value: float) -> str:
    kind = {"matmul": "", "read": "reads "}.get(measure.kind, f"{measure.kind} ")
    return f"{kind}{figure(value)} {measure.unit}"


def _fix(part: str) -> str:
    return _FIXES["path" if part.startswith("/") else "GPU" if part.startswith("GPU") else "processor"]


def _links(measures: Sequence[Measure], network: Network) -> list[Finding]:
    pairs = {(m.node, m.to): m for m in measures if m.kind == BANDWIDTH}
    speeds = {edge: measure.value for edge, measure in pairs.items()}
    latencies = {(m.node, m.to): m.value for m in measures if m.kind == LATENCY}
    lossy = links.lossy_links({edge: measure.again for edge, measure in pairs.items()}, speeds)
    # Lost packets also slow down the other direction, because acknowledgements are lost.
    touched = {node for each in lossy for node in each.nodes}
    slow = [each for each in links.slow_links(speeds, latencies) if not touched & set(each.nodes)]
    found = [_slow_link(each, network, alone=len(speeds) == 2) for each in (*lossy, *slow)]
    if not found and (seen := links.below_negotiated(speeds, network.negotiated)) is not None:
        value, most = seen
        what = f"{figure(value)} Gb/s between two nodes, although their links negotiated {figure(most)}"
        found.append(Finding(("all",), "links", BOTH, f"{what} ({value / most:.2f})", "", _FIXES["link"]))
    return found


def _slow_link(each: Slow, network: Network, *, alone: bool) -> Finding:
    cause = f"packet loss, {100 * each.again:.0f} % of the TCP segments were retransmitted" if each.again else ""
    than = f"{figure(each.others)} ({each.value / each.others:.2f})"
    if not each.nodes:
        return Finding(("all",), "links", BOTH, f"{figure(each.value)} Gb/s", cause, _FIXES["link"])
    interface = f"link {network.interfaces.get(each.nodes[0], '')}".strip()
    if each.way == links.ANSWERS:
        what = f"latency {figure(each.value)} us, others {figure(each.others)}"
        return Finding(each.nodes, interface, (links.ANSWERS,), what, cause, _FIXES["link"])
    if each.way:
        what = f"{each.way} {figure(each.value)} Gb/s, others {than}"
        return Finding(each.nodes, interface, (each.way,), what, cause, _FIXES["link"])
    what = f"{figure(each.value)} Gb/s, {'other direction' if alone else 'other pairs'} {than}"
    return Finding(each.nodes, "link", ("pair",), what, cause, _FIXES["link"], undecided=alone and not cause)


def _matching(found: Finding, problems: Sequence[HealthProblem]) -> list[HealthProblem]:
    """Return the problems that the machine reports for this part, or for any of its links."""
    of_link = ("link", "InfiniBand")
    return [
        problem
        for problem in problems
        if problem.node in found.nodes
        and (problem.part == found.part or (found.part.startswith("link") and problem.part.startswith(of_link)))
    ]


def _explained(found: Finding, problems: Sequence[HealthProblem]) -> Finding:
    matching = _matching(found, problems)
    if not matching:
        return found
    known = [found.cause] if found.cause and not found.undecided else []
    cause = ", ".join([*known, *(problem.what for problem in matching)])
    return replace(found, cause=cause, fix=matching[0].fix, undecided=False)


def figure(value: float) -> str:
    """Format with three significant digits, the precision of a measurement."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
