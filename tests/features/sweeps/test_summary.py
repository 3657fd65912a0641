"""What is printed when a sweep has ended: at 80 columns, and only commands of the features that there are."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from launcher.api.jobs import load
from launcher.features import FEATURES
from launcher.features.sweeps.continued import known_sweep
from launcher.features.sweeps.screen import _table as live_table
from launcher.features.sweeps.summary import following, summary, table
from launcher.features.sweeps.sweep import SweepState, Variant
from launcher.job.overrides import variant_name
from launcher.records.sweeps import command_of

GROUP = "night-20261128-200000-bbbb"


def run(index: int) -> str:
    return f"night-20261128-20000{index}-000{index}"


def printed(sweep: Any, failed: int = 0, top1: float | None = None, count: int = 2) -> list[str]:
    keys = {"name": "night", "runtime": "process", "nodes": ["local"], "run": {"command": ["true"]}}
    job = load({**keys, "sweep": sweep})
    names = [variant_name(args) for args in job.sweep]
    states = [SweepState.FAILED if index < failed else SweepState.DONE for index in range(len(names))]
    values = dict(zip(names, job.sweep, strict=True))
    why = "gpu-a: exited with code 1: ValueError: loss is nan"
    variants = [
        Variant(name, state, ("gpu-a",), run(index), top1=top1, why=why, values=values[name])
        for index, (name, state) in enumerate(zip(names, states, strict=True))
    ]
    assert len(variants) == count
    console = Console(file=io.StringIO(), width=80)
    for part in summary(GROUP, variants, f"launcher up JOB --resume {GROUP}", 80):
        console.print(part)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in lines)
    return [line.rstrip() for line in lines]


def test_the_values_come_first_and_three_commands_last() -> None:
    lines = printed({"grid": {"lr": ["0.1", "0.2"], "epochs": [3]}})
    assert lines == [
        "lr   state  nodes  run",
        "0.1  done   gpu-a  night-20261128-200000-0000",
        "0.2  done   gpu-a  night-20261128-200001-0001",
        f"to compare them:     launcher compare {GROUP}",
        f"to see their curves: launcher tensorboard {GROUP}",
    ]


def test_failures_have_their_cause_and_what_runs_them_again() -> None:
    text = " ".join(printed([{"lr": 1}, {"lr": 2}, {"batch": 3}], failed=1, top1=90.0, count=3))
    assert "lr  batch  state   top-1  nodes  run" in text
    assert "lr=1 failed: gpu-a: exited with code 1: ValueError: loss is nan: launcher logs" in text
    assert f"to run these again:  launcher up JOB --resume {GROUP}" in text


def test_the_command_that_resumes_a_sweep_repeats_how_it_was_started() -> None:
    keys = {"name": "night", "runtime": "process", "nodes": ["local"], "run": {"command": ["true"]}}
    job = load({**keys, "sweep": [{"lr": 1}]}, set={"run.args.x": 2})
    command = command_of(known_sweep(job, 3), GROUP)
    assert command == f"launcher up JOB --set run.args.x=2 --max-parallel 3 --resume {GROUP}"


@pytest.mark.parametrize("sweep", [[["--lr", "0.1"], ["--lr", "0.2"]], [{"data": "/d" * 99}, {"data": "/e" * 99}]])
def test_long_values_and_lists_fit(sweep: Any) -> None:
    assert "night-20261128-200001-0001" in " ".join(printed(sweep))


def test_a_table_that_does_not_fit_is_a_line_for_each_variant() -> None:
    keys = ("learning_rate", "weight_decay", "momentum", "label_smoothing", "warmup_epochs")
    text = " ".join(printed([dict.fromkeys(keys, value) for value in ("0.125", "0.25")], failed=1, top1=90.0))
    for index, (value, state) in enumerate([("0.125", "failed"), ("0.25", "done")]):
        assert f"{variant_name(dict.fromkeys(keys, value))}: {state}, top-1 90.00, on gpu-a: {run(index)}" in text


def test_each_row_is_told_apart_also_of_a_variant_for_which_nothing_was_set() -> None:
    values: list[Any] = [{"lr": "1"}, (), {}]
    rows = [Variant(name, values=own) for name, own in zip(("lr=1", "default", "default #2"), values, strict=True)]
    [found] = table(rows, 80)
    assert [*found.columns[0].cells] == [Text(each.name) for each in rows]
    again = [Variant(name, values=values[0]) for name in ("lr=1", "lr=1 #2")]
    [found] = table(again, 80)
    assert [*found.columns[0].cells] == [Text(each.name) for each in again]


def test_only_commands_that_there_are_are_named() -> None:
    without = {name: feature for name, feature in FEATURES.items() if name != "compare"}
    assert [*following(GROUP, without)] == [
        f"to fetch them:       launcher fetch {GROUP} --checkpoints",
        f"to see their curves: launcher tensorboard {GROUP}",
    ]


def test_the_table_of_a_running_sweep_has_no_empty_columns() -> None:
    [table] = live_table([Variant("lr=1", SweepState.RUNNING, ("gpu-a",)), Variant("lr=2")], 40)
    assert [column.header for column in table.columns] == ["variant", "nodes", "state"]
