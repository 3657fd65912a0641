"""Measurements of each fault: its test prints them and appends them to the file named by LAUNCHER_FIGURES.

`python -m tests.e2e.figures FILE` prints them as a table, with the latest measurement of each fault.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

HEAD = (
    "fault",
    "nodes",
    "outcome",
    "reported after s",
    "resumed after s",
    "intervals lost",
    "lines lost",
    "left",
)


@dataclass(frozen=True)
class Figures:
    """The measurements of one fault.

    reported: seconds from the fault until the launcher reported it; None if it reported nothing. resumed: seconds from
    the fault (or from its end, if it heals) until the next step, or until `up` exits if the fault ends the run.
    intervals: checkpoint intervals of training that had to be repeated, at worst.
    """

    fault: str
    nodes: int
    outcome: str
    reported: float | None
    resumed: float | None
    intervals: float
    lines_lost: int
    left: int

    def cells(self) -> tuple[str, ...]:
        def seconds(value: float | None) -> str:
            return "-" if value is None else f"{value:.1f}"

        return (
            self.fault,
            str(self.nodes),
            self.outcome,
            seconds(self.reported),
            seconds(self.resumed),
            f"{self.intervals:.1f}",
            str(self.lines_lost),
            str(self.left),
        )

    def publish(self) -> None:
        print("; ".join(f"{name}: {cell}" for name, cell in zip(HEAD, self.cells(), strict=True)))
        if path := os.environ.get("LAUNCHER_FIGURES"):
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(dataclasses.asdict(self)) + "\n")


def table(text: str) -> str:
    """Markdown, in the order in which the faults were first tested, then by number of nodes."""
    seen = [Figures(**json.loads(line)) for line in text.splitlines()]
    faults = list(dict.fromkeys(figures.fault for figures in seen))
    last = {(faults.index(figures.fault), figures.nodes): figures for figures in seen}
    rows = [HEAD, ("---",) * len(HEAD), *(last[key].cells() for key in sorted(last))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text(encoding="utf-8")))
