"""`launcher fetch --best TAG`: the run with the best value of a tag, and the checkpoint that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from launcher.cli.fetch import Chosen
from launcher.errors import UsageError
from launcher.features.compare.command import tag_row
from launcher.features.compare.curves import checkpoint_of, files_of
from launcher.features.compare.tags import TagRow, by_tag, sentence
from launcher.records.groups import labels
from launcher.records.paths import RunPaths, as_shown
from launcher.records.store import Record


def options(
    runs: Callable[[], Sequence[Path]],
    *,
    best: Annotated[
        str | None,
        typer.Option("--best", metavar="TAG", help="Only the run with the best value of this tag, with --checkpoints."),
    ] = None,
    lowest: Annotated[bool, typer.Option("--min", help="With --best: the lowest value is the best.")] = False,
) -> Chosen | None:
    """With --best TAG, the run of a sweep with the highest value of a curve is
    downloaded, and the checkpoint that belongs to that value is named.
    """
    if best is None:
        if lowest:
            raise UsageError("--min", "needs --best TAG", "for example: --best Loss/val --min")
        return None
    records = [Record(RunPaths(folder)) for folder in runs()]
    names = labels([(record, group.variant if (group := record.group) else None) for record in records])
    rows = [tag_row(record, name) for record, name in zip(records, names, strict=True)]
    ordered = by_tag(rows, best, [record.paths for record in records], lowest=lowest, option="--best")
    first = ordered[0]
    if first.best is None:
        raise UsageError(f"--best {best}", "the curves of this tag have no number", "to see them: launcher tensorboard")
    return Chosen(first.run, lambda folder: _said(ordered, folder, lowest=lowest))


def _said(rows: Sequence[TagRow], folder: Path, *, lowest: bool) -> str:
    text, best = sentence(rows, lowest=lowest), rows[0].best
    checkpoint, why = checkpoint_of(best.point, folder, files_of(folder)) if best else (None, "")
    if checkpoint is None:
        return f"{text}; the program has written no checkpoint that is known as one by its name"
    return f"{text}\nits checkpoint: {as_shown(checkpoint)}, which {why}"
