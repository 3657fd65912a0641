"""The table of a benchmark: nodes x measures, at most 80 columns wide, with outliers marked. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from launcher.features.bench.health.measures import BANDWIDTH, LATENCY, Measure
from launcher.features.bench.health.verdict import Finding, figure

WIDTH = 80
_CELL = 8
ODD, DIFFERS = "!", "?"
_ORDER = ("matmul", "memory", "copy", "to GPU", "from GPU", "peer", "read", "sends", "receives", "latency")
_SHORT = {"from GPU": "to host", "receives": "receive", "sends": "send"}


def table(nodes: Sequence[str], measures: Sequence[Measure], findings: Sequence[Finding]) -> list[str]:
    """Return the table, one row per node: the slowest of its GPUs or mounts, the median of its pairs."""
    columns = [kind for kind in _ORDER if _values(kind, measures)]
    first = max(WIDTH - _CELL * len(columns), 6)
    units = {kind: _values(kind, measures)[0][1] for kind in columns}
    rows = [["", *(_SHORT.get(kind, kind) for kind in columns)], ["", *(units[kind] for kind in columns)]]
    for node in nodes:
        cells = [_cell(node, kind, measures, findings) for kind in columns]
        rows.append([node if len(node) <= first else f"{node[: first - 1]}~", *cells])
    width = min(first, max(len(row[0]) for row in rows))
    marked = [[f"{cell} " if cell[-1:] not in (ODD, DIFFERS) else cell for cell in row[1:]] for row in rows]
    return [
        f"{row[0]:{width}}{''.join(f'{cell:>{_CELL}}' for cell in cells)}".rstrip()
        for row, cells in zip(rows, marked, strict=True)
    ]


def _values(kind: str, measures: Sequence[Measure], node: str | None = None) -> list[tuple[float, str]]:
    """Return value and unit of the measures that belong to the column."""
    return [(m.value, m.unit) for m in measures if _belongs(kind, m, node)]


def _belongs(kind: str, measure: Measure, node: str | None) -> bool:
    ends: Callable[[], tuple[str, ...]] = {
        "sends": lambda: (measure.node,) if measure.kind == BANDWIDTH else (),
        "receives": lambda: (measure.to,) if measure.kind == BANDWIDTH else (),
        "latency": lambda: (measure.node, measure.to) if measure.kind == LATENCY else (),
    }.get(kind, lambda: (measure.node,) if measure.kind == kind else ())
    return bool(ends()) if node is None else node in ends()


def _cell(node: str, kind: str, measures: Sequence[Measure], findings: Sequence[Finding]) -> str:
    found = [value for value, _ in _values(kind, measures, node)]
    if not found:
        return "-"
    of_pairs = kind in ("sends", "receives", "latency")
    return figure(median(found) if of_pairs else min(found)) + _mark(node, kind, findings)


def _mark(node: str, kind: str, findings: Sequence[Finding]) -> str:
    for each in findings:
        if kind in each.kinds and each.nodes in ((node,), ("all",)):
            return DIFFERS if each.undecided else ODD
    for each in findings:
        if len(each.nodes) == 2 and node in each.nodes:
            ends = {"sends": each.nodes[0], "receives": each.nodes[1]}
            if kind in each.kinds or ("pair" in each.kinds and ends.get(kind) == node):
                return DIFFERS
    return ""
