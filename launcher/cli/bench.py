"""Output of `launcher doctor --bench`: a table, then a line for each abnormal part."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from launcher.health.measures import ALL_REDUCE
from launcher.health.table import DIFFERS, ODD, table
from launcher.health.verdict import figure
from launcher.run.bench import BenchResult


def show_bench(console: Console, examined: BenchResult) -> None:
    for node, why in examined.skipped.items():
        console.print(f"[yellow]skipped[/] {escape(f'{node}: {why}')}")
    console.print()
    for line in table(examined.nodes, examined.measures, examined.findings):
        console.print(_marked(line))
    for measure in examined.measures:
        if measure.kind == ALL_REDUCE:
            console.print(f"all-reduce over all nodes: {figure(measure.value)} {measure.unit} bus bandwidth")
    for note in examined.notes:
        console.print(escape(f"note: {note}"))
    console.print()
    for finding in examined.findings:
        sign = f"[yellow]{DIFFERS} warning:[/]" if finding.undecided else f"[bold red]{ODD}[/]"
        console.print(f"{sign} {escape(finding.line)}")
    if examined.nodes and not examined.findings:
        console.print("no part is slower than comparable parts")


def _marked(line: str) -> str:
    line = escape(line)
    return line.replace(ODD, f"[bold red]{ODD}[/]").replace(DIFFERS, f"[yellow]{DIFFERS}[/]")
