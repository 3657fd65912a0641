"""Failures of public threads: the right cause, or none."""

from __future__ import annotations

import re

import pytest

from launcher.faults.lookup import cause_of_output, cause_of_report
from launcher.faults.table import ENGINE, IMAGE, UNLIMITED
from tests import public_failures
from tests.public_failures import FIRST, JUDGED, LATER, MISLED, Row

_RAISED = re.compile(r"^(?:\[rank\d+\]: )?[\w.]*(?:Error|Exception)(?::|$)", re.MULTILINE)
_TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n'


def as_log(text: str) -> str:
    """Return the end of the log of a program that raised the text's exception, of which a thread shows some lines."""
    if text.startswith("  "):
        return _TRACEBACK + text
    found = _RAISED.search(text)
    return text if found is None else text[: found.start()] + _TRACEBACK + text[found.start() :]


def told(row: Row) -> str:
    """Return the cause and the fix that are said, or ""."""
    log = as_log(row.text)
    known = {"node": "gpu-a", "port": "29500", "place": IMAGE, "output": "/output", "code": str(row.code)}
    known |= {} if row.limited else {"memlock": UNLIMITED}
    cause = cause_of_report(ENGINE, row.text) if row.who == public_failures.ENGINE else cause_of_output(log, log, known)
    return f"{cause.what} -> {cause.fix}" if cause else ""


@pytest.mark.parametrize("row", [*FIRST, *LATER, *JUDGED, *MISLED], ids=lambda row: row.source)
def test_the_right_cause_is_told_or_none(row: Row) -> None:
    cause = told(row)
    assert cause == "" or (row.right is not None and re.search(row.right, cause)), cause


def test_the_failures_are_those_that_the_note_counts() -> None:
    found = [(len(rows), sum(bool(told(row)) for row in rows)) for rows in (FIRST, LATER, JUDGED, MISLED)]
    assert found == [(46, 17), (12, 4), (30, 13), (4, 3)], "docs/internals/faults.md"
