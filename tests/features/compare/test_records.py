"""compare on records of runs whose files have values of other types: a message, never an unexpected error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_record_fuzz import ID, METRICS, OTHER, call, changed, fuzz, lines, project
from tests.unit.test_sweep_names import project as sweeps
from tests.unit.test_sweep_names import sweep_of_code, with_a_later_run

__all__ = ["project", "sweeps"]

COMMANDS = [["compare"], ["compare", ID, OTHER, "--html", "page.html"], ["compare", ID, "--json"]]


def test_compare_on_any_record_ends_with_a_message(project: Path) -> None:
    assert fuzz(project, 20, 1, COMMANDS) == 20


@pytest.mark.slow
def test_compare_on_many_records_ends_with_a_message(project: Path) -> None:
    assert fuzz(project, 480, 2, COMMANDS) == 480


@pytest.mark.parametrize("parallel", [["ddp"], 7, {"a": 1}])
def test_a_program_may_write_any_value_into_its_metrics(project: Path, parallel: Any) -> None:
    for place, value in (((0, "parallel"), parallel), ((3, "val", "top1"), parallel), ((4, "seconds"), parallel)):
        (project / "runs" / ID / "metrics.jsonl").write_text(lines(changed(METRICS, place, value)))
        code, printed = call("compare")
        assert code == 0
        assert "lr=0.1" in printed


@pytest.mark.parametrize("known", [True, False])
def test_from_another_folder_it_says_where_runs_are_looked_for(
    project: Path, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = project if known else project / "elsewhere"
    here.mkdir(exist_ok=True)
    monkeypatch.chdir(here)
    code, printed = call("compare", "night")
    assert code == 2
    assert f" in {here}/runs/ (runs are recorded where `up` is called)" in " ".join(printed.split())
    assert "-> call it in the folder where `up` was called" in printed


def test_a_variant_of_code_has_the_name_that_was_asked_for(sweeps: Path) -> None:
    """Also one that has no run yet."""
    group, variants = sweep_of_code(sweeps)
    ledger = json.loads(call("compare", group, "--json")[1])
    known = [(each["variant"], each["label"], each["asked"]) for each in ledger]
    assert known == [*zip(variants.keys(), variants.values(), ("main", "try-1", None), strict=True)]


def test_a_later_run_of_the_same_name_is_told_from_the_sweep(sweeps: Path) -> None:
    says = with_a_later_run(sweeps)
    assert says in call("compare", "night")[1]
    assert says in call("fetch", "night", "--best", "a")[1]
