"""Ending a run on every node and leaving nothing of it there: idempotent, and honest about who did not confirm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import RunId
from launcher.node.connect import Fleet
from launcher.node.engine import Engine

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
    before_removal: Callable[[Engine, ContainerState], None] | None = None,
) -> list[Removed]:
    """Stop and remove every container of the run on these nodes, with what it left in shared memory.

    before_removal: called with each ended container, to read what must not be lost.
    Raises NodesFailed where a node did not do all of it.
    """

    def on_node(engine: Engine) -> Removed:
        found = engine.list({labels.RUN: run})
        ended = [s if s.phase.ended or s.phase is Phase.CREATED else engine.stop(s.id, grace) for s in found]
        for state in ended:
            if before_removal is not None and state.phase is not Phase.CREATED:
                before_removal(engine, state)
            engine.remove(state.id)
        started = [state.started for state in ended if state.started]
        swept = engine.sweep_shared_memory(min(started)) if started else ()
        return Removed(engine.node, tuple(ended), tuple(swept))

    return fleet.each(on_node)
