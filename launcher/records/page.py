"""One self-contained HTML page of a comparison, to share: the table and the picture, no script, nothing to load."""

from __future__ import annotations

import html
from collections.abc import Sequence

from launcher.records.compare import Row, cells
from launcher.records.plot import draw

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1300px; padding: 0 1em; color: #222; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { padding: .3em .5em; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
svg { width: 100%; height: auto; }
"""


def page(rows: Sequence[Row], title: str) -> str:
    """The page. Raises UsageError where matplotlib is missing."""
    head, *body = cells(rows)
    table = _line("th", head) + "".join(_line("td", line) for line in body)
    svg = draw(rows, "svg").decode()
    picture = svg[svg.index("<svg") :]  # without the XML declaration, which HTML does not know
    runs = "".join(
        f"<li>{html.escape(row.measured.label)}: <code>{html.escape(row.measured.run)}</code>"
        f"{', against <code>' + html.escape(row.against) + '</code>' if row.against else ''}</li>"
        for row in rows
    )
    name = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{STYLE}</style></head>"
        f'<body><h1>{name}</h1><div class="wide"><table>{table}</table></div>'
        f"<p>~ against a run with another global batch: images a second are compared.</p>{picture}<h2>Runs</h2>"
        f"<ul>{runs}</ul></body></html>\n"
    )


def _line(tag: str, row: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
