"""What a person reads when a sweep has ended: its variants by their values, why some failed, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from launcher.cli.status import STYLES
from launcher.features import FEATURES, Feature
from launcher.features.sweeps.continued import known_sweep, member
from launcher.features.sweeps.sweep import SweepState, Variant
from launcher.job.models import Job
from launcher.job.overrides import shown_value, variants
from launcher.model.plan import shortened
from launcher.records.groups import latest_of
from launcher.records.measured import top1

_LONGEST = 30  # characters of a value in the table
_BETWEEN = 2  # characters between columns


def recorded(group: str, job: Job) -> list[Variant]:
    """Return the variants of a sweep as the latest run of each is recorded, in the order of the sweep."""
    found, known, sweep = list[Variant](), latest_of(group), known_sweep(job)
    for each in variants(job):
        record = known.get(each.name)
        own = (record and record.group) or member(group, each, sweep)
        name, values = own.named, own.named_values or each.values
        result = (record.result() if record else None) or {}
        if record is None:
            found.append(Variant(name, values=values))
            continue
        state = {"done": SweepState.DONE, "stopped": SweepState.STOPPED, "": SweepState.RUNNING}
        failure = result.get("failure") or {}
        why = f"{failure.get('node')}: {failure.get('what')}" if failure else str(result.get("why", ""))
        shown = state.get(result.get("state", ""), SweepState.FAILED)
        nodes = tuple(node.name for node in record.nodes())
        best, code, by = top1(result.get("last", {})), result.get("exit_code"), result.get("ended_by")
        found.append(Variant(name, shown, nodes, record.run, None, best, code, why, by, values))
    return found


def summary(group: str, variants: Sequence[Variant], resume: str, width: int) -> Iterator[RenderableType]:
    """Yield the table, the failures and the next commands. resume: the one that runs the variants without a result.

    width: in which the table has to fit. One that does not would lose columns: then each variant has a line of text.
    """
    yield from table(variants, width) or map(_line, variants)
    failed = [variant for variant in variants if variant.state is SweepState.FAILED]
    for variant in failed:
        logs = f": launcher logs {variant.run}" if variant.run else ""
        yield Text(f"{variant.name} failed: {variant.why or 'see its log'}{logs}")
    if failed or any(variant.state is not SweepState.DONE for variant in variants):
        yield Text(f"to run these again:  {resume}")
    yield from map(Text, following(group))


def following(group: str, features: Mapping[str, Feature] = FEATURES) -> Iterator[str]:
    """Yield the commands that a person wants next, of the features that there are."""
    if any("compare" in feature.commands for feature in features.values()):
        yield f"to compare them:     launcher compare {group}"
    else:
        yield f"to fetch them:       launcher fetch {group} --checkpoints"
    yield f"to see their curves: launcher tensorboard {group}"


def table(variants: Sequence[Variant], width: int) -> list[Table]:
    """Return a row for each variant, its values first; columns without a cell are left out. []: it does not fit."""
    values = _values(variants)
    rows = [
        [*values_of, variant.shown_state, _top1(variant), ", ".join(variant.nodes), variant.run or ""]
        for values_of, variant in zip(zip(*values.values(), strict=True), variants, strict=True)
    ]
    heads = [*values, "state", "top-1", "nodes", "run"]
    kept = [index for index, head in enumerate(heads) if head in (*values, "state") or any(row[index] for row in rows)]
    columns = [Column(heads[index], no_wrap=True) for index in kept]
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        cells = [Text(row[index]) for index in kept]
        cells[kept.index(len(values))].stylize(_style(row[len(values)]))
        table.add_row(*cells)
    widths = (max(cell_len(line[index]) for line in (heads, *rows)) for index in kept)
    return [table] if sum(widths) + _BETWEEN * (len(kept) - 1) <= width else []


def _line(variant: Variant) -> Text:
    """Return `lr=0.1: done, top-1 90.00, on gpu-a: RUN`."""
    state = Text(variant.shown_state, style=_style(variant.shown_state))
    accuracy = f", top-1 {shown}" if (shown := _top1(variant)) else ""
    nodes = f", on {', '.join(variant.nodes)}" if variant.nodes else ""
    return Text.assemble(f"{variant.name}: ", state, f"{accuracy}{nodes}", f": {variant.run}" if variant.run else "")


def _top1(variant: Variant) -> str:
    return "" if variant.top1 is None else f"{variant.top1:.2f}"


def _style(state: str) -> str:
    return STYLES.get(state.partition(" ")[0], "")


def _values(variants: Sequence[Variant]) -> Mapping[str, Sequence[str]]:
    """Return the values of each argument in which the variants differ, by its name. If these do not tell them apart (of
    lists, and of a variant for which nothing is set), their names.
    """
    named = [variant.values for variant in variants if isinstance(variant.values, Mapping)]
    every = dict.fromkeys(key for args in named for key in args)
    values = {key: [shown_value(args[key]) if key in args else "" for args in named] for key in every}
    shown = {key: column for key, column in values.items() if len(set(column)) > 1} or values
    short = {key: [shortened(value, _LONGEST) for value in column] for key, column in shown.items()}
    rows = [*zip(*short.values(), strict=True)]
    told_apart = len(set(rows)) == len(variants) and all(any(row) for row in rows)
    return short if told_apart else {"variant": [variant.name for variant in variants]}
