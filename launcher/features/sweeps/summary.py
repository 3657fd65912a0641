"""What a person reads when a sweep has ended: its variants by their values, why some failed, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from launcher.cli.status import STYLES
from launcher.features import FEATURES, Feature
from launcher.features.sweeps.sweep import SweepState, Variant
from launcher.job.models import Job
from launcher.job.overrides import shown_value, variant_name, variants
from launcher.model.plan import shortened
from launcher.records.groups import latest_of
from launcher.records.measured import top1

_LONGEST = 30  # characters of a value in the table


def recorded(group: str, job: Job) -> list[Variant]:
    """Return the variants of a sweep as the latest run of each is recorded, in the order of the sweep."""
    found, known = list[Variant](), latest_of(group)
    for each in variants(job):
        name = each.name
        record = known.get(name)
        result = (record.result() if record else None) or {}
        if record is None:
            found.append(Variant(name, values=each.values))
            continue
        state = {"done": SweepState.DONE, "stopped": SweepState.STOPPED, "": SweepState.RUNNING}
        failure = result.get("failure") or {}
        why = f"{failure.get('node')}: {failure.get('what')}" if failure else str(result.get("why", ""))
        shown = state.get(result.get("state", ""), SweepState.FAILED)
        nodes = tuple(node.name for node in record.nodes())
        best, code, by = top1(result.get("last", {})), result.get("exit_code"), result.get("ended_by")
        found.append(Variant(name, shown, nodes, record.run, None, best, code, why, by, each.values))
    return found


def summary(group: str, variants: Sequence[Variant], resume: str) -> Iterator[RenderableType]:
    """Yield the table, the failures and the next commands. resume: the one that runs the variants without a result."""
    yield table(variants)
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
    best = any("fetch" in feature.options for feature in features.values())
    yield f"to fetch the best:   launcher fetch {group} {'--best TAG' if best else '--checkpoints'}"
    yield f"to see their curves: launcher tensorboard {group}"


def table(variants: Sequence[Variant]) -> Table:
    """Return a row for each variant, its values first; columns without a cell are left out."""
    values = _values([variant.values for variant in variants])
    rows = [
        [
            *values_of,
            variant.shown_state,
            "" if variant.top1 is None else f"{variant.top1:.2f}",
            ", ".join(variant.nodes),
            variant.run or "",
        ]
        for values_of, variant in zip(zip(*values.values(), strict=True), variants, strict=True)
    ]
    heads = [*values, "state", "top-1", "nodes", "run"]
    kept = [index for index, head in enumerate(heads) if head in (*values, "state") or any(row[index] for row in rows)]
    columns = [Column(heads[index], no_wrap=heads[index] == "run") for index in kept]
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        cells = [Text(row[index]) for index in kept]
        cells[kept.index(len(values))].stylize(STYLES.get(row[len(values)].partition(" ")[0], ""))
        table.add_row(*cells)
    return table


def _name(values: Mapping[str, Any] | Sequence[str]) -> str:
    return variant_name(values if isinstance(values, Mapping) else tuple(values))


def _values(sweep: Sequence[Mapping[str, Any] | Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """Return the values of each argument in which the variants differ, by its name; of lists the whole variant."""
    named = [args for args in sweep if isinstance(args, Mapping)]
    if len(named) < len(sweep):
        return {"variant": [shortened(_name(args), _LONGEST) for args in sweep]}
    every = dict.fromkeys(key for args in named for key in args)
    values = {key: [shown_value(args[key]) if key in args else "" for args in named] for key in every}
    shown = {key: column for key, column in values.items() if len(set(column)) > 1} or values
    return {key: [shortened(value, _LONGEST) for value in column] for key, column in shown.items()}
