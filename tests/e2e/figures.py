"""The figures of a fault: printed by its test, kept in the file that LAUNCHER_FIGURES names, shown as a table.

`python -m tests.e2e.figures FILE` prints the table; of a fault that was tried several times it shows the last.
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
    "told after s",
    "going on after s",
    "intervals lost",
    "lines lost",
    "left",
)


@dataclass(frozen=True)
class Figures:
    """What was seen of one fault.

    told: seconds from the fault until the launcher said so; None where it had nothing to say. again: seconds from the
    fault (of one that heals: from its end) until the next step, or until the end of `up` where the fault ends
    the run. intervals: between two checkpoints, the most that any restart lost.
    """

    fault: str
    nodes: int
    outcome: str
    told: float | None
    again: float | None
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
            seconds(self.told),
            seconds(self.again),
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
    """Markdown, by fault in the order in which they were first tried, then by nodes."""
    seen = [Figures(**json.loads(line)) for line in text.splitlines()]
    faults = list(dict.fromkeys(figures.fault for figures in seen))
    last = {(faults.index(figures.fault), figures.nodes): figures for figures in seen}
    rows = [HEAD, ("---",) * len(HEAD), *(last[key].cells() for key in sorted(last))]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text(encoding="utf-8")))
