"""Logs, attempts and metrics of a run's nodes for `launcher status`; one command reads those of a whole cluster."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.records.store import NodeOfRun
from launcher.run.locate import Attached

_LOGS = 4 << 20  # bytes of all logs in total
_MOST, _LEAST = 8192, 256  # bytes of each log
# $1: a random separator, which no program prints. $2: the shared output folder. $3: bytes of each log. It starts three
# programs, independent of the number of nodes. It runs on the login machine, so it does not report memory and GPUs.
_SCRIPT = r"""
cd "$2" || exit 0
echo "$1"; tail -c 8192 metrics.jsonl 2>/dev/null
echo; echo "$1"; (cd state 2>/dev/null && grep -H '' node-*.attempts 2>/dev/null)
echo "$1"; tail -v -c "$3" logs/node-*.log 2>/dev/null
"""
_ATTEMPT = re.compile(rb"^(node-\d+)\.attempts:(.*\n)", re.MULTILINE)
_LOG = re.compile(rb"^==> logs/(node-\d+)\.log <==\n", re.MULTILINE)


@dataclass(frozen=True)
class Printed:
    """Ends of a node's files. use: memory and GPU utilization of its machine; None if not queried."""

    log: bytes = b""
    attempts: bytes = b""
    metrics: bytes = b""
    denied: bytes = b""
    use: bytes | None = None


def print_cluster(attached: Attached, nodes: Sequence[NodeOfRun]) -> dict[str, Printed]:
    """Return the ends of the files of a cluster's nodes by node name. Raises NodeUnreachable, NodeUnfit."""
    first, mark = nodes[0], secrets.token_hex(16)
    most = max(_LEAST, min(_MOST, _LOGS // len(nodes)))
    text = attached.engines[first.name].sh(_SCRIPT, mark, first.output, str(most))
    metrics, tried, logs = [*text.split(f"{mark}\n".encode()), *[b""] * 3][1:4]
    found: dict[str, list[bytes]] = {}
    for name, line in _ATTEMPT.findall(tried):
        found.setdefault(name.decode(), []).append(line)
    _, *parts = _LOG.split(logs)
    ends = {name.decode(): log for name, log in zip(parts[::2], parts[1::2], strict=True)}
    printed = {n.name: Printed(ends.get(n.name, b""), b"".join(found.get(n.name, ()))) for n in nodes}
    master = next((node.name for node in nodes if node.rank == 0), first.name)
    return {**printed, master: replace(printed[master], metrics=metrics)}
