"""Parse the measurements that the nodes of a benchmark print (container_scripts/bench_node.py). Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MARK = "launcher-measured "
BANDWIDTH, LATENCY, ALL_REDUCE = "bandwidth", "latency", "all-reduce"
TRAINED = GRADIENTS, STEP, PASSES = "gradients", "step", "passes"  # of the trainer's model: bytes, seconds, a number
SENT, COMPRESSION = "sent", "compression"  # of its gradients, for the --gradient-compression `of`: bytes, seconds
HANGS = " hang"  # end of the reason why copies between GPUs were not measured
_NO_MEASURE = ("begun", "phase", "failed", "note", "end")


@dataclass(frozen=True)
class Measure:
    """One value. For a pair, `to` is the other node: bandwidth from `node` to it, or latency of a message."""

    node: str
    kind: str  # matmul, memory, copy, to GPU, from GPU, peer, read, bandwidth, latency, all-reduce, TRAINED
    part: str  # "GPU 3", "processor", the path in the container; "" for a pair
    value: float
    unit: str
    of: str = ""  # GPU model, number of threads or path: only equal ones are compared
    to: str = ""
    again: float = 0.0  # share of TCP segments that were retransmitted during the measurement
    precision: str = ""


@dataclass(frozen=True)
class NodeReport:
    """Everything that a node reported before it finished or was lost."""

    node: str
    measures: tuple[Measure, ...]
    failed: tuple[tuple[str, str, str], ...]  # part, the other node of a pair or "", reason
    notes: tuple[str, ...]
    phase: str  # the last phase that it started; "" before the start, "end" after the last one
    together: tuple[str, ...]  # the nodes that started with it


def read(node: str, names: Sequence[str], log: str, gpus: Mapping[str, str]) -> NodeReport:
    """Parse the log of a node. names: the nodes by rank. log: untrusted output, possibly truncated.

    gpus: names of the GPUs on the machine, by their names in the container and by UUID.
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
        except (LookupError, TypeError, ValueError, OverflowError):
            continue
    return NodeReport(node, tuple(measures), tuple(failed), tuple(notes), phase, together)


def _lines(log: str) -> Iterator[Mapping[str, Any]]:
    for line in log.splitlines():
        if line.startswith(MARK):
            try:
                found = json.loads(line.removeprefix(MARK))
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found
