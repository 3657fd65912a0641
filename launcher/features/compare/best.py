"""`launcher fetch --best TAG`: the run with the best value of a tag, and the checkpoint that belongs to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli.fetch import Chosen
from launcher.errors import UsageError
from launcher.features.compare.command import tag_row
from launcher.features.compare.curves import Best, checkpoint_of, files_of
from launcher.features.compare.tags import TagRow, by_tag, its_checkpoint, sentence
from launcher.records.groups import labels
from launcher.records.paths import RunPaths
from launcher.records.store import Record

if TYPE_CHECKING:
    from launcher.run.end.fetch import Fetched


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
    downloaded, and the checkpoint that belongs to that value is named; with --json
    as `best`: tag, run, step, value, checkpoint.
    """
    if best is None:
        if lowest:
            raise UsageError("--min", "needs --best TAG", "for example: --best Loss/val --min")
        return None
    records = [Record(RunPaths(folder)) for folder in runs()]
    names = labels([(record, group.variant if (group := record.group) else None) for record in records])
    rows = [tag_row(record, name) for record, name in zip(records, names, strict=True)]
    ordered = by_tag(rows, best, lowest=lowest, option="--best")
    first_best = ordered[0].best
    if first_best is None:
        raise UsageError(f"--best {best}", "the curves of this tag have no number", "to see them: launcher tensorboard")

    def found(fetched: Fetched) -> Best:
        checkpoint, why = checkpoint_of(first_best.point, fetched.folder, files_of(fetched.folder))
        return replace(first_best, checkpoint=checkpoint, why=why)

    return Chosen(
        first_best.run,
        lambda fetched: _said(ordered, found(fetched), fetched, lowest=lowest),
        lambda fetched: {"best": found(fetched).to_dict()},
    )


def _said(rows: Sequence[TagRow], best: Best, fetched: Fetched, *, lowest: bool) -> str:
    text = sentence(rows, lowest=lowest)
    if said := its_checkpoint(best):
        return f"{text}\n{said}"
    if fetched.gone:
        return f"{text}; no checkpoint of it is left"
    return f"{text}; no file that its program has written is known as a checkpoint by its name"
