"""Ending a run on every node and leaving nothing of it there: idempotent, and honest about who did not confirm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import RunId
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.records.collect import collect

GRACE = 45.0  # a trainer saves its checkpoint on SIGTERM; torchrun gives its workers 30 s of that


@dataclass(frozen=True)
class Removed:
    """What one node confirmed: the ended containers that were removed there, and shared memory files swept up."""

    node: str
    containers: tuple[ContainerState, ...]
    swept: tuple[str, ...]


def stop(
    fleet: Fleet,
    run: RunId,
    *,
    grace: float = GRACE,
    into: Path | None = None,
) -> list[Removed]:
    """Stop and remove every container of the run on these nodes, with what it left in shared memory.

    into: a folder here that logs and curves are brought to before anything is removed.
    Raises NodesFailed where a node did not do all of it.
    """

    def on_node(engine: Engine) -> Removed:
        found = engine.list({labels.RUN: run})
        ended = [s if s.phase.ended or s.phase is Phase.CREATED else engine.stop(s.id, grace) for s in found]
        for state in ended:
            if into is not None and state.phase is not Phase.CREATED:
                collect(engine.files, state.labels[labels.OUTPUT], into)
            engine.remove(state.id)
        started = [state.started for state in ended if state.started]
        swept = engine.sweep_shared_memory(min(started)) if started else ()
        return Removed(engine.node, tuple(ended), tuple(swept))

    return fleet.each(on_node)
