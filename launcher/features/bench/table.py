"""The table of a benchmark: nodes x measures, at most 80 columns wide, with outliers marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from rich.markup import escape
from rich.table import Table

from launcher.features.bench.health.measures import BANDWIDTH, LATENCY, Measure
from launcher.features.bench.health.verdict import Finding, figure

WIDTH = 80
_CELL = 8
ODD, DIFFERS = "[bold red]![/]", "[yellow]?[/]"
_ORDER = ("matmul", "memory", "copy", "to GPU", "from GPU", "peer", "read", "sends", "receives", "latency")
_SHORT = {"from GPU": "to host", "receives": "receive", "sends": "send"}


def table(nodes: Sequence[str], measures: Sequence[Measure], findings: Sequence[Finding]) -> Table:
    """Return the table, one row per node: the slowest of its GPUs or mounts, the median of its pairs."""
    columns = [kind for kind in _ORDER if _values(kind, measures)]
    made = Table(box=None, padding=0, pad_edge=False, header_style="")
    made.add_column(max_width=max(WIDTH - _CELL * len(columns), 6), no_wrap=True)
    for kind in columns:
        unit = _values(kind, measures)[0][1]
        made.add_column(f"{_SHORT.get(kind, kind)}\n{unit}", justify="right", min_width=_CELL - 1, no_wrap=True)
        made.add_column(width=1)  # the mark
    for node in nodes:
        row = [escape(node)]
        for kind in columns:
            row += [_cell(node, kind, measures), _mark(node, kind, findings)]
        made.add_row(*row)
    return made


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


def _cell(node: str, kind: str, measures: Sequence[Measure]) -> str:
    found = [value for value, _ in _values(kind, measures, node)]
    if not found:
        return "-"
    of_pairs = kind in ("sends", "receives", "latency")
    return figure(median(found) if of_pairs else min(found))


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
