"""Ending a run on every node and leaving nothing of it there: idempotent; nodes that did not confirm are named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.errors import LauncherError, NodesFailed
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import RunId
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import run_all_settled
from launcher.records.collect import OutputFolder, collect

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

    def end(engine: Engine) -> list[ContainerState]:
        found = engine.list({labels.RUN: run})
        return [s if s.phase.ended or s.phase is Phase.CREATED else engine.stop(s.id, grace) for s in found]

    def remove(engine: Engine, ended: Sequence[ContainerState]) -> Removed:
        for state in ended:
            engine.remove(state.id)
        started = [state.started for state in ended if state.started]
        swept = engine.sweep_shared_memory(min(started)) if started else ()
        return Removed(engine.node, tuple(ended), tuple(swept))

    ended = run_all_settled([partial(end, engine) for engine in fleet.engines])
    reached: list[tuple[Engine, Sequence[ContainerState]]] = [
        (engine, states)
        for engine, states in zip(fleet.engines, ended, strict=True)
        if not isinstance(states, LauncherError)
    ]
    failures = [outcome for outcome in ended if isinstance(outcome, LauncherError)]
    if into is not None:
        reached, not_brought = _bring(reached, into)
        failures += not_brought
    removed = run_all_settled([partial(remove, *pair) for pair in reached])
    failures += [outcome for outcome in removed if isinstance(outcome, LauncherError)]
    if failures:
        raise NodesFailed(failures, of=len(fleet.engines))
    return [outcome for outcome in removed if not isinstance(outcome, LauncherError)]


def _bring(
    reached: Sequence[tuple[Engine, Sequence[ContainerState]]], into: Path
) -> tuple[list[tuple[Engine, Sequence[ContainerState]]], list[LauncherError]]:
    """Bring the files of all that ran; those whose files came, so that they may be removed, and why others' did not."""
    ran = {
        (engine.host, state.labels[labels.OUTPUT]): OutputFolder(engine.files, state.labels[labels.OUTPUT], ())
        for engine, states in reached
        for state in states
        if state.phase is not Phase.CREATED
    }
    results = dict(zip(ran, collect(list(ran.values()), into), strict=True))
    failed = {place: result for place, result in results.items() if isinstance(result, LauncherError)}
    kept = [
        (engine, states)
        for engine, states in reached
        if not any((engine.host, state.labels.get(labels.OUTPUT, "")) in failed for state in states)
    ]
    return kept, list(failed.values())
