"""compare on records of runs whose files have values of other types: a message, never an unexpected error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_record_fuzz import ID, METRICS, OTHER, call, changed, fuzz, lines, project

__all__ = ["project"]

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
