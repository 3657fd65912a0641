"""One self-contained HTML page of a comparison, to share: a table to sort, curves to point at, nothing to load."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from math import isfinite

from launcher.records.compare import Row, cells


def page(rows: Sequence[Row], title: str) -> str:
    """The page: page.html with the table, which needs no script, and the figures for its curves."""
    head, *body = cells(rows)
    runs = "".join(
        f"<li>{html.escape(row.measured.label)}: <code>{html.escape(row.measured.run)}</code>"
        f"{', against <code>' + html.escape(row.against) + '</code>' if row.against else ''}</li>"
        for row in rows
    )
    figures = [row.to_dict() | {"losses": [p for p in row.measured.losses if isfinite(p[1])]} for row in rows]
    parts = {
        "title": html.escape(title),
        "table": f"<thead>{_line('th', head)}</thead><tbody>{''.join(_line('td', line) for line in body)}</tbody>",
        "runs": runs,
        "data": json.dumps(figures).replace("<", "\\u003c"),  # no name in it can end the script
    }
    text = resources.files("launcher.records").joinpath("page.html").read_text(encoding="utf-8")
    for name, part in parts.items():  # no part can hold another's mark: their < are escaped
        text = text.replace(f"<!--{name}-->", part)
    return text


def _line(tag: str, row: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
