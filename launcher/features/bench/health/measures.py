"""Parse the measurements that the nodes of a benchmark print (container_scripts/bench_node.py). Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MARK = "launcher-measured "
BANDWIDTH, LATENCY, ALL_REDUCE = "bandwidth", "latency", "all-reduce"
TRAINED = GRADIENTS, STEP, PASSES = "gradients", "step", "passes"  # of the trainer's model: bytes, seconds, a number
SENT, COMPRESSION = "sent", "compression"  # of its gradients, for the --gradient-compression `of`: bytes, seconds
HANGS = " hang"  # end of the reason why copies between GPUs were not measured


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
    measures: list[Measure] = []
    failed: list[tuple[str, str, str]] = []
    notes: list[str] = []
    phase, together = "", tuple[str, ...]()
    for line in _lines(log):
        with suppress(LookupError, TypeError, ValueError, OverflowError):  # a line of another form
            to = names[line["to"]] if "to" in line else ""
            match line.get("kind"):
                case "begun":
                    phase, together = "local", tuple(names[rank] for rank in line["ranks"])
                case "phase":
                    phase = str(line["name"])
                case "end":
                    phase = "end"
                case "failed":
                    failed.append((_part(line, gpus), to, str(line["what"])))
                case "note":
                    notes.append(str(line["what"]))
                case kind if math.isfinite(line["value"]):
                    measures.append(_measure(node, str(kind), to, line, gpus))
    return NodeReport(node, tuple(measures), tuple(failed), tuple(notes), phase, together)


def _measure(node: str, kind: str, to: str, line: Mapping[str, Any], gpus: Mapping[str, str]) -> Measure:
    return Measure(
        node,
        kind,
        _part(line, gpus),
        float(line["value"]),
        unit=str(line.get("unit", "")),
        of=str(line.get("of", "")),
        to=to,
        again=float(line.get("again", 0)),
        precision=str(line.get("precision", "")),
    )


def _part(line: Mapping[str, Any], gpus: Mapping[str, str]) -> str:
    """Return what was measured, a GPU by its name on the machine."""
    uuid, part = str(line.get("uuid", "")).lower(), str(line.get("part", ""))
    return gpus[uuid] if uuid in gpus else gpus.get(part, part)


def _lines(log: str) -> Iterator[Mapping[str, Any]]:
    for line in log.splitlines():
        if line.startswith(MARK):
            try:
                found = json.loads(line.removeprefix(MARK))
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found
