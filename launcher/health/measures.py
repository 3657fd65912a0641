"""What the nodes of a bench measured, as they print it (container_scripts/bench_node.py). Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MARK = "launcher-measured "
BANDWIDTH, LATENCY, ALL_REDUCE = "bandwidth", "latency", "all-reduce"
_NO_MEASURE = ("begun", "phase", "failed", "note", "end")


@dataclass(frozen=True)
class Measure:
    """One figure. Of a pair (`to` is another node): what `node` sends to it, and how long a message takes."""

    node: str
    kind: str  # matmul, memory, copy, to GPU, from GPU, peer, read, bandwidth, latency, all-reduce
    part: str  # "GPU 3", "processor", the path in the container; "" of a pair
    value: float
    unit: str
    of: str = ""  # only parts of the same kind are compared: the GPU's name, the number of threads, the path
    to: str = ""
    again: float = 0.0  # share of the TCP segments that had to be sent again meanwhile
    precision: str = ""


@dataclass(frozen=True)
class Said:
    """All that a node said until it ended or was lost."""

    node: str
    measures: tuple[Measure, ...]
    failed: tuple[tuple[str, str, str], ...]  # part, the other node of a pair or "", why
    notes: tuple[str, ...]
    phase: str  # the last one that it has begun; "" before the nodes began, "end" after all
    together: tuple[str, ...]  # the nodes that began with it


def read(node: str, names: Sequence[str], log: str, gpus: Mapping[str, str]) -> Said:
    """names: the nodes by rank. log: whole or cut off anywhere; it comes from a node and may have anything in it.

    gpus: what a GPU is called on the machine, by what the container calls it and by its UUID.
    """
    measures, failed, notes, phase, together = [], [], [], "", ()
    for line in _lines(log):
        kind = line.get("kind")
        try:
            to = names[line["to"]] if "to" in line else ""
            part = str(line.get("part", ""))
            part = gpus.get(str(line.get("uuid", "")).lower(), gpus.get(part, part))
            if kind == "begun":
                phase, together = "local", tuple(names[rank] for rank in line["ranks"])
            elif kind == "phase":
                phase = str(line["name"])
            elif kind == "end":
                phase = "end"
            elif kind == "failed":
                failed.append((part, to, str(line["what"])))
            elif kind == "note":
                notes.append(str(line["what"]))
            elif math.isfinite(line["value"]):
                unit, of, precision = (str(line.get(key, "")) for key in ("unit", "of", "precision"))
                again = float(line.get("again", 0))
                measures.append(Measure(node, str(kind), part, float(line["value"]), unit, of, to, again, precision))
        except (LookupError, TypeError, ValueError):
            continue
    return Said(node, tuple(measures), tuple(failed), tuple(notes), phase, together)


def _lines(log: str) -> Iterator[Mapping[str, Any]]:
    for line in log.splitlines():
        if line.startswith(MARK):
            try:
                found = json.loads(line.removeprefix(MARK))
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found
