"""Ending a run on every node and leaving nothing of it there: idempotent; nodes that did not confirm are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from launcher.errors import LauncherError, NodesFailed
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import RunId
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import run_all_settled, run_both
from launcher.records.collect import OutputFolder, collect
from launcher.records.paths import NodePaths
from launcher.run.attempts import stop_line
from launcher.run.owner import caller

GRACE = 45.0  # seconds; a trainer saves its checkpoint on SIGTERM, and torchrun gives its workers 30 s of that


@dataclass(frozen=True)
class EndedContainer:
    state: ContainerState
    stopped: bool  # by stop(); else it had ended by itself, or never started


@dataclass(frozen=True)
class Removed:
    """What one node confirmed: the containers that were removed there, and the shared memory files."""

    node: str
    containers: tuple[EndedContainer, ...]
    swept: tuple[str, ...]


def stop(
    fleet: Fleet,
    run: RunId,
    *,
    grace: float = GRACE,
    into: Path | None = None,
    listed: Mapping[Engine, Sequence[ContainerState]] | None = None,
) -> list[Removed]:
    """Stop and remove every container of the run on these nodes, with what it left in shared memory.

    into: a folder here for logs and curves, which are collected before anything is removed. listed: the run's
    containers and claims where the caller has just listed them.
    Raises NodesFailed where a node did not do all of it.
    """
    found = [partial(_end, engine, run, grace, None if listed is None else listed[engine]) for engine in fleet.engines]
    ended = run_all_settled(found)
    if into is not None:
        ended = _collect(fleet.engines, ended, into)
    removed = run_all_settled([partial(_remove, *pair) for pair in zip(fleet.engines, ended, strict=True)])
    failures = [outcome for outcome in removed if isinstance(outcome, LauncherError)]
    if failures:
        raise NodesFailed(failures, of=len(fleet.engines))
    return [outcome for outcome in removed if isinstance(outcome, Removed)]


Ended = Sequence[EndedContainer] | LauncherError


def _end(engine: Engine, run: RunId, grace: float, listed: Sequence[ContainerState] | None) -> Ended:
    if listed is None:
        own = engine.list({labels.RUN: run, labels.UID: str(engine.uid())})
        listed = [state for state in own if labels.readable(state.labels)]
    idle = {state.id for state in listed if state.phase.ended or state.phase is Phase.CREATED}
    return [EndedContainer(state, False) if state.id in idle else _stop(engine, state, grace) for state in listed]


def _stop(engine: Engine, state: ContainerState, grace: float) -> EndedContainer:
    """Launchers that are attached to the run read first who stops it."""
    told = labels.read(state.labels)
    attempts = NodePaths(told.output, told.node).attempts
    engine.sh('[ ! -f "$1" ] || echo "$2" >>"$1"', attempts, stop_line(caller()))
    return EndedContainer(engine.stop(state.id, grace), True)


def _collect(engines: Sequence[Engine], ended: Sequence[Ended], into: Path) -> list[Ended]:
    """The files of all that ran; where that failed, why, in place of the containers: they must not be removed then."""
    folders: dict[tuple[str, str], OutputFolder] = {}
    of_node: list[set[tuple[str, str]]] = []
    for engine, outcome in zip(engines, ended, strict=True):
        containers = [] if isinstance(outcome, LauncherError) else outcome
        outputs = {labels.read(c.state.labels).output for c in containers if c.state.phase is not Phase.CREATED}
        of_node.append({(engine.host, output) for output in outputs})
        folders |= {(engine.host, output): OutputFolder(engine.files, output, ()) for output in outputs}
    results = dict(zip(folders, collect(list(folders.values()), into), strict=True))
    failed = {place: result for place, result in results.items() if isinstance(result, LauncherError)}
    return [
        next((failed[place] for place in places if place in failed), outcome)
        for places, outcome in zip(of_node, ended, strict=True)
    ]


def _remove(engine: Engine, ended: Ended) -> Removed:
    if isinstance(ended, LauncherError):
        raise ended

    def remove() -> None:
        for container in ended:
            engine.remove(container.state.id)

    started = [container.state.started for container in ended if container.state.started]
    _, swept = run_both(remove, lambda: engine.sweep_shared_memory(min(started)) if started else ())
    return Removed(engine.node, tuple(ended), tuple(swept))
