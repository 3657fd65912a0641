"""A comparison of runs by the tags of their curves: the last value of each, and the best one of a chosen tag."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import isfinite
from typing import Any

from launcher.cli.status import LONGEST
from launcher.errors import UsageError
from launcher.features.compare.comparison import fill_page, fitted
from launcher.features.compare.curves import Best, Curve, Piece, best_of, in_order, json_number, tags_of
from launcher.naming import first_of
from launcher.records.paths import as_shown
from launcher.run.state import BUDGET

NO_RESULT = "no result yet"  # state of a run of which nothing else is known
MOST = 4  # tags in a table that nobody has chosen
_DRAWN = 1000  # points of a curve on a page
_NAMED = 8  # tags that are named below it
_LOWER_IS_BETTER = ("loss", "error", "perplexity", "wer", "mse", "mae")


@dataclass(frozen=True)
class TagRow:
    """A run and its curves, by tag. best: with --by. why: what a run without curves has to say.

    run: "" of a variant that has none yet. budget: it ended at its budget. away: its end is not recorded here, so its
    curves are those that were fetched last. pieces: what it and the runs that it goes on from have: its curves, joined.
    """

    run: str
    label: str
    state: str
    curves: Mapping[str, Curve]
    best: Best | None = None
    why: str = ""
    budget: bool = False
    away: bool = False
    pieces: Sequence[Piece] = ()

    @property
    def named(self) -> str:
        """Its label, with its state if it is known and not `done`."""
        return self.label if self.state in ("done", NO_RESULT) else f"{self.label} ({self.state})"

    def to_dict(self) -> dict[str, Any]:
        """Return the scalars for JSON."""
        scalars = {tag: _scalar(curve) for tag, curve in self.curves.items()}
        return {"scalars": scalars, "by": self.best and self.best.to_dict()}


def _scalar(curve: Curve) -> dict[str, Any]:
    ends = {"last": curve.last, "max": curve.best(), "min": curve.best(lowest=True)}
    return {name: point and {"step": point.step, "value": json_number(point.value)} for name, point in ends.items()}


def by_tag(rows: Sequence[TagRow], tag: str, *, lowest: bool, option: str = "--by") -> list[TagRow]:
    """Return the rows with the best value of the tag, the best first. Raises as `require`."""
    require(rows, tag, option)
    found = [replace(row, best=best_of(tag, row.pieces, lowest=lowest)) for row in rows]

    def order(row: TagRow) -> tuple[bool, float]:
        return row.best is None, 0.0 if row.best is None else row.best.point.value * (1 if lowest else -1)

    return sorted(found, key=order)


def require(rows: Sequence[TagRow], tag: str, option: str) -> None:
    """Raise UsageError if no run has the tag. option: with which the user has given it."""
    known = tags_of([row.curves for row in rows], 10**6)
    if tag not in known:
        near = get_close_matches(tag, known, _NAMED, 0.4) or known[:_NAMED]
        fix = f"tags of these runs: {', '.join(near)}" if near else "they have no curves: launcher status"
        if away := [f"launcher fetch {row.run}" for row in rows if row.away]:
            fix += f"; those of {len(away)} of them may not be here yet: {' && '.join(away)}"
        raise UsageError(f"{option} {tag}", "no run has this tag", fix)


def shown_tags(rows: Sequence[TagRow], tags: Sequence[str], by: str | None) -> list[str]:
    """Return the tags to show beside that of --by: those that the user has named, else the ones that most runs have.

    These come in the order of their importance; `in_order` is that of a table.
    """
    known = tags_of([row.curves for row in rows], 10**6)
    return [*tags] or [tag for tag in known if tag != by][: MOST - (by is not None)]


def table(rows: Sequence[TagRow], tags: Sequence[str], by: str | None, width: int | None) -> str:
    """Return a Markdown table. On a narrow terminal, labels are shortened, and the last tags left out: not that of `by`
    or those that the user has named, nor the only one.
    """
    shown = shown_tags(rows, tags, by)
    while True:
        lines = lines_of(rows, shown if tags else in_order(shown), by)
        label, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
        room = None if width is None else width - sum(others) - 3 * len(lines[0]) - 1
        if tags or len(shown) <= (by is None) or room is None or min(label, LONGEST["variant"]) <= room:
            break
        shown.pop()
    labels, apart = fitted([row.label for row in rows], room)
    rows = [replace(row, label=label) for row, label in zip(rows, labels, strict=True)]
    lines = lines_of(rows, shown if tags else in_order(shown), by)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = 1 + ("state" in lines[0])
    rule = "|" + "|".join("-" * (w + 2) if i < left else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    padded = [
        [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    first, *rest = [f"| {' | '.join(line)} |" for line in padded]
    text = "\n".join([first, rule, *rest])
    if hidden := [tag for tag in tags_of([row.curves for row in rows], 10**6) if tag not in (*shown, by)]:
        text += "\n\n" + textwrap.fill(f"other tags (--tag): {first_of(hidden, _NAMED)}", width or 80)
    return text + apart


def lines_of(rows: Sequence[TagRow], tags: Sequence[str], by: str | None) -> list[list[str]]:
    """Return the table's cells, header first."""
    states = any(row.state != "done" or not row.curves for row in rows)
    return [_head(tags, by, states=states), *(_cells(row, tags, by, states=states) for row in rows)]


def page_of_tags(rows: Sequence[TagRow], tags: Sequence[str], by: str | None, title: str) -> str:
    """Return a self-contained HTML page with the table, and the curves of these tags side by side."""
    head, *body = lines_of(rows, tags, by)
    drawn = dict.fromkeys([*([by] if by else []), *tags])
    figures = [
        {"label": row.label, "curves": {tag: _thinned(row.curves[tag]) for tag in drawn if tag in row.curves}}
        for row in rows
    ]
    runs = "".join(f"<li>{html.escape(row.label)}: <code>{html.escape(row.run)}</code></li>" for row in rows if row.run)
    return fill_page(title, head, body, runs, figures)


def _thinned(curve: Curve) -> list[tuple[int, float]]:
    known = [(point.step, point.value) for point in curve.points if isfinite(point.value)]
    return known[:: max(1, len(known) // _DRAWN)]


def _head(tags: Sequence[str], by: str | None, *, states: bool) -> list[str]:
    return ["run", *(["state"] if states else []), *([f"best {by}", "step"] if by else []), *map(_escaped, tags)]


def _cells(row: TagRow, tags: Sequence[str], by: str | None, *, states: bool) -> list[str]:
    state = [_state(row)] if states else []
    best = [f"{row.best.point.value:.4g}", str(row.best.point.step)] if row.best else ["", ""]
    values = [f"{row.curves[tag].last.value:.4g}" if tag in row.curves else "" for tag in tags]
    return [_escaped(row.label), *state, *(best if by else []), *values]


def _state(row: TagRow) -> str:
    state = shown_state(row.state, budget=row.budget)
    return state if row.curves or not row.run else f"{state}, no curves"


def shown_state(state: str, *, budget: bool) -> str:
    """Return a state as tables have it. budget: the run ended at its budget."""
    return f"{state} by {BUDGET}" if budget else state


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def verdict(rows: Sequence[TagRow], *, lowest: bool, command: str) -> str:
    """Return what is best, and where its checkpoint is. command: the one that brings it."""
    first = rows[0]
    if first.best is None:
        return ""
    text = sentence(rows, lowest=lowest)
    if ignored := [row.label for row in rows if row.best is None and row.away]:
        text += f"\nnot compared, as this curve of them is not here: {', '.join(ignored)}"
    return f"{text}\n{its_checkpoint(first.best) or f'to bring its checkpoint: {command}'}"


def its_checkpoint(best: Best) -> str:
    """Return which checkpoint belongs to the best value, or why that is not known; "": none is here."""
    if best.checkpoint is None:
        return best.why and f"which checkpoint belongs to it is not known: {best.why}"
    return f"its checkpoint: {as_shown(best.checkpoint)}, which {best.why}"


def lower_is_better(tag: str) -> bool:
    return any(word in tag.lower() for word in _LOWER_IS_BETTER)


def sentence(rows: Sequence[TagRow], *, lowest: bool) -> str:
    """Return what the best value is, which the first row has, and which other rows have the same."""
    row, others = rows[0], rows[1:]
    assert row.best is not None
    tag, point = row.best.tag, row.best.point
    text = f"best: {row.named}, {tag} {point.value:.6g} at step {point.step}"
    text += f", in {row.best.run}, from which it was resumed" if row.best.run != row.run else ""
    doubtful = not lowest and lower_is_better(tag)
    text = f"{text} (the highest; for the lowest: --min)" if doubtful else text
    ties = [other.named for other in others if other.best is not None and other.best.point.value == point.value]
    if ties:
        text += f"; with the same value: {first_of(ties, _NAMED)}"
    return text
