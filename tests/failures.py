"""What is said of the evidence of nodes, without their machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.run.end import explain
from launcher.run.end.evidence import Evidence
from launcher.run.result import Failure


def first_failure(evidence: Sequence[Evidence], known: Mapping[str, str] | None = None) -> Failure | None:
    """known: of the run, for faults.lookup.cause_of_output."""
    return explain.first_failure(explain.EndedRun(evidence, known=known or {}))
