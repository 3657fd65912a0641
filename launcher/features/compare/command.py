"""`launcher compare`: tables and plots of experiments from the records of runs."""

from __future__ import annotations

import json as json_
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from launcher.api.history import NOT_STARTED, beside, states_by_nodes
from launcher.cli import completion, options, terminal, wrapping
from launcher.errors import RunUnknown, UsageError
from launcher.features.compare.comparison import Unmeasured, markdown, page
from launcher.features.compare.comparison import compare as compare_
from launcher.features.compare.curves import Piece, curves, files_of, in_order, joined, of_validation
from launcher.features.compare.ledger import entry, seconds_in_all, without_run
from launcher.features.compare.measured import Measured, read
from launcher.features.compare.plot import draw, draw_tags
from launcher.features.compare.tags import (
    NO_RESULT,
    TagRow,
    by_tag,
    lower_is_better,
    page_of_tags,
    require,
    shown_state,
    shown_tags,
    table,
    verdict,
)
from launcher.job.scalars import duration
from launcher.local_files import write_atomic
from launcher.records.groups import differences, labels, pieces_of, select, unstarted_of
from launcher.records.masking import printed
from launcher.records.store import Record, find, job_of, without_nodes
from launcher.run.state import BUDGET


def compare(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...|GROUP",
            autocompletion=completion.runs,
            help="Runs or a sweep (default: the latest sweep or job).",
        ),
    ] = None,
    baseline: Annotated[str | None, typer.Option(metavar="RUN", help="Compare all runs with this run.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a plot to FILE (.png or .svg).")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML page to FILE.")] = None,
    by: Annotated[
        str | None, typer.Option(metavar="TAG", help="Show the best value of this tag first, with its step.")
    ] = None,
    lowest: Annotated[bool, typer.Option("--min", help="With --by: the lowest value is the best.")] = False,
    tag: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Show the last value of this tag.")] = None,
    json: options.Json = False,
) -> None:
    """Print a Markdown table: the figures of the launcher's trainer, where each run
    is compared with the run that has the fewest devices and the same model and
    global batch size; of other programs, or with --by or --tag, the curves' tags.

    Example: launcher compare --html comparison.html
    """
    _check(plot, html, by, lowest=lowest)
    fix = "call it in the folder where `up` was called, or bring a run here: launcher fetch RUN --nodes a,b"
    with without_nodes(fix):
        chosen = select(runs or [])
    for record, variant in chosen:
        if variant is None and job_of(record.run) in (runs or []) and (sweep := beside(record.run)):
            terminal.note(f"the latest run of {job_of(record.run)} is {record.run}{sweep}")
    names = labels(chosen)
    states = states_by_nodes([record for record, _ in chosen])
    measured, others = _read(chosen, names, states)
    tagged = [tag_row(record, name, states.get(record.run)) for (record, _), name in zip(chosen, names, strict=True)]
    if by is not None:
        tagged = by_tag(tagged, by, lowest=lowest)
    for one in tag or []:
        require(tagged, one, "--tag")
    left = unstarted_of([record for record, _ in chosen])
    shown = [*tagged, *(TagRow("", variant.named, NOT_STARTED, {}) for variant in left)]
    base = None
    if baseline is not None:
        base = find(baseline).run
        if base not in {run.run for run in measured}:
            raise UsageError(base, "is not one of the compared runs", "add it to the arguments")
    others += [Unmeasured("", variant.named, NOT_STARTED) for variant in left]
    rows = compare_(measured, base)
    settings = {record.run: own for (record, _), own in zip(chosen, differences(chosen), strict=True)}
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else None
    of_trainer = bool(measured) and by is None and not tag
    tags = tag or in_order(shown_tags(tagged, [], by))
    if json:
        records = {record.run: record for record, _ in chosen}
        of_the_trainer = {row.measured.run: row.to_dict() for row in rows}
        found = [
            of_the_trainer.get(row.run, {}) | {"settings": settings[row.run]} | entry(records[row.run], row)
            for row in tagged
        ]
        terminal.say(json_.dumps([*found, *map(without_run, left)], indent=2))
    elif of_trainer:
        ordered = [
            settings[run]
            for run in (*(row.measured.run for row in rows), *(other.run for other in others if other.run))
        ]
        terminal.say(markdown(rows, width, others, ordered))  # contains text from a program's metrics
    else:
        terminal.say(table(shown, tag or [], by, width))
        _explain(tagged, by, width, lowest=lowest, name=" ".join(runs or []))
    if not json:
        if by is None and len(tagged) > 1:
            _name_best(tags, runs or [])
        _name_resumed([(record, name) for (record, _), name in zip(chosen, names, strict=True)], of_trainer=of_trainer)
        _name_away(tagged, runs or [])
        _name_budget(
            [name for (record, _), name in zip(chosen, names, strict=True) if _has_budget(record)], len(chosen)
        )
    title = "Comparison: " + ", ".join(runs or [job_of(chosen[-1][0].run)])
    if plot is not None:
        form = plot.suffix.lower()[1:]
        drawn = [*([by] if by else []), *tags]
        write_atomic(plot, draw(rows, form) if of_trainer else draw_tags(tagged, drawn, form))
        terminal.note(f"wrote {plot}")
    if html is not None:
        text = page(rows, title, others) if of_trainer else page_of_tags(shown, tags, by, title)
        write_atomic(html, text.encode(errors="replace"))  # a program's metrics may have lone surrogates
        terminal.note(f"wrote {html}")


def _check(plot: Path | None, html: Path | None, by: str | None, *, lowest: bool) -> None:
    """Raise UsageError for options of which nothing could come."""
    if plot is not None and plot.suffix.lower() not in (".png", ".svg"):
        raise UsageError(str(plot), "unsupported image format", "use a file name that ends with .png or .svg")
    for file in filter(None, (plot, html)):
        if not file.parent.is_dir():
            make = shlex.join(["mkdir", "-p", str(file.parent)])
            raise UsageError(str(file), "there is no such folder", f"run: {make}")
    if lowest and by is None:
        raise UsageError("--min", "needs --by TAG", "for example: --by Loss/val --min")


def _read(
    chosen: Sequence[tuple[Record, str | None]], names: Sequence[str], states: Mapping[str, str]
) -> tuple[list[Measured], list[Unmeasured]]:
    """Return the trainer's measurements of each run, and the runs without any."""
    measured, others = list[Measured](), list[Unmeasured]()
    for (record, _), name in zip(chosen, names, strict=True):
        try:
            measured.append(read(record.paths, name))
        except RunUnknown:
            state = shown_state(_state(record, states.get(record.run)), budget=_has_budget(record))
            others.append(Unmeasured(record.run, name, state))
    return measured, others


def _state(record: Record, seen: str | None) -> str:
    return str((record.result() or {}).get("state", seen or NO_RESULT))


def tag_row(record: Record, name: str, seen: str | None = None) -> TagRow:
    """Return the curves of a run, from its record. name: its label. seen: its state by its nodes, if it was asked."""
    result = record.result()
    failure = (result or {}).get("failure") or {}
    why = f"{failure.get('node', '')}: {failure.get('what', '')}" if failure else ""
    pieces = [_piece(each) for each in pieces_of(record)]
    budget, away = _has_budget(record), result is None
    return TagRow(record.run, name, _state(record, seen), joined(pieces), None, why, budget, away, pieces)


def _piece(record: Record) -> Piece:
    files = files_of(record.paths.root)
    return Piece(record.run, record.paths.root, files, curves(record.paths, files))


def _has_budget(record: Record) -> bool:
    return (record.result() or {}).get("ended_by") == BUDGET


def _name_budget(names: Sequence[str], of: int) -> None:
    """Say which runs ended at their budget. of: number of all."""
    if names:
        terminal.note("ended by their budget: " + ("all" if len(names) == of else ", ".join(names)))


def _name_best(tags: Sequence[str], names: Sequence[str]) -> None:
    """Name the command that finds the best of these runs, if one of the tags is known to tell it."""
    if tag := of_validation(tags):
        how = ["--by", tag, *(["--min"] if lower_is_better(tag) else [])]
        terminal.note(f"for the best by this tag: {shlex.join(['launcher', 'compare', *names, *how])}")


def _name_resumed(named: Sequence[tuple[Record, str]], *, of_trainer: bool) -> None:
    """Say which variants went on in another run: they have trained longer than that, each with a whole budget."""
    said = []
    for record, name in named:
        if (count := len(pieces_of(record))) > 1:
            time = seconds_in_all(record)
            said.append(f"{name} ({count} runs" + (")" if time is None else f", {duration(time)} in all)"))
    if said:
        terminal.note(f"resumed: {', '.join(said)}" + "; the figures are those of the last run" * of_trainer)


def _name_away(rows: Sequence[TagRow], names: Sequence[str]) -> None:
    """Name the runs whose end is not recorded here: there may be more of their curves on their nodes."""
    if away := [f"{row.label} ({row.state})" for row in rows if row.away]:
        missing = {row.run for row in rows if row.away}
        if len(names) > 1:
            names = [name for name in names if any(record.run in missing for record, _ in select([name]))]
        fetch = " && ".join(shlex.join(["launcher", "fetch", *one]) for one in ([[name] for name in names] or [[]]))
        terminal.note(
            f"the end of these is not recorded here, and their figures are as fetched last: {', '.join(away)}"
        )
        terminal.note(f"to fetch them: {fetch}")


def _say(text: str, width: int | None) -> None:
    """Print lines to stdout. width: of the terminal; None: they are not broken."""
    text = printed(text)  # before it is broken
    if width is not None:
        text = "\n".join(" " * line.indent + text[line.start : line.end] for line in wrapping.lines(text, width))
    terminal.say(text)


def _explain(rows: Sequence[TagRow], by: str | None, width: int | None, *, lowest: bool, name: str) -> None:
    """Say what is best, why runs have failed, and where curves may be that are not here."""
    if by is not None:
        one = name.split() if len(name.split()) < 2 else [rows[0].run]  # fetch takes one name
        command = shlex.join(["launcher", "fetch", *one, "--best", by, *(["--min"] if lowest else [])])
        _say(f"\n{verdict(rows, lowest=lowest, command=command)}", width)
    failed = [row for row in rows if row.why]
    for row in failed:
        _say(f"{row.label} failed: {row.why}: launcher logs {row.run}", width)
    if not any(row.curves for row in rows):
        what = "no curves of these runs are here (TensorBoard's files or metrics.jsonl)"
        where = "if the program writes metrics.csv or trainer_state.json"
        each = [shlex.join(["launcher", "fetch", *one, "--checkpoints"]) for one in ([word] for word in name.split())]
        terminal.note(f"{what}; {where}: {' && '.join(each) or 'launcher fetch --checkpoints'}")
