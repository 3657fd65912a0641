"""Logs, attempts and metrics of a run's nodes for `launcher status`; one command reads those of a whole cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.node.files import Span
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun
from launcher.run.attempts import LIMIT
from launcher.run.locate import Attached

_LOGS = 4 << 20  # bytes of all logs in total
_ATTEMPTS = 64 << 20  # the same of attempts
_MOST, _LEAST = 8192, 256  # bytes of each log, and of the metrics


@dataclass(frozen=True)
class Printed:
    """Ends of a node's files. use: memory and GPU utilization of its machine; None if not queried."""

    log: bytes = b""
    attempts: bytes = b""
    metrics: bytes = b""
    denied: bytes = b""
    use: bytes | None = None
    nccl: bytes = b""  # lines of NCCL's logs


def print_cluster(attached: Attached, nodes: Sequence[NodeOfRun]) -> dict[str, Printed]:
    """Return the ends of the files of a cluster's nodes by node name. Raises NodeUnreachable, NodeUnfit."""
    first = nodes[0]
    output, most = first.output, max(_LEAST, min(_MOST, _LOGS // len(nodes)))
    paths = {node.name: NodePaths(output, node.name) for node in nodes}
    logs = {name: Span(own.log, -most, most) for name, own in paths.items()}
    tried = {name: Span(own.attempts, 0, min(LIMIT, _ATTEMPTS // len(nodes))) for name, own in paths.items()}
    metrics = Span(paths[first.name].metrics, -_MOST, _MOST)
    found: dict[Span, bytes] = {}
    spans = [metrics, *tried.values(), *logs.values()]
    for span, piece in attached.engines[first.name].files.read_spans(spans, below=output):
        found[span] = found.get(span, b"") + piece
    master = next((node.name for node in nodes if node.rank == 0), first.name)
    return {
        name: Printed(
            log=found.get(logs[name], b""),
            attempts=found.get(tried[name], b""),
            metrics=found.get(metrics, b"") if name == master else b"",
        )
        for name in paths
    }
