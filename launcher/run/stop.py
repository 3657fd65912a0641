"""Ending a run on every node and leaving nothing of it there: idempotent; nodes that did not confirm are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from launcher.errors import LauncherError, NodesFailed
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import RunId
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import run_all_settled, run_both
from launcher.records.collect import OutputFolder, collect
from launcher.records.paths import NodePaths
from launcher.records.store import Record
from launcher.run.attempts import ANNOUNCE, stop_line
from launcher.run.locate import caller

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
    into: Record | None = None,
    warn: Callable[[str], None] = lambda _: None,
    listed: Mapping[Engine, Sequence[ContainerState]] | None = None,
) -> list[Removed]:
    """Stop and remove every container of the run on these nodes, with what it left in shared memory.

    into: the record, for which logs and curves are collected before anything is removed. warn: called with each file
    that was not; it stays in the output folder. listed: the run's containers and claims where the caller has just
    listed them.
    Raises NodesFailed where a node did not do all of it.
    """
    found = [partial(_end, engine, run, grace, None if listed is None else listed[engine]) for engine in fleet.engines]
    ended = run_all_settled(found)
    if into is not None:
        _collect(fleet.engines, ended, into, warn)
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
    ended = []
    for state in listed:
        # A cluster's job that waits has never run either, but it has a reason, and launchers that wait for it.
        if state.phase.ended or (state.phase is Phase.CREATED and not state.error):
            ended.append(EndedContainer(state, False))
            continue
        told = labels.read(state.labels)  # launchers that are attached to the run read first who stops it
        engine.sh(ANNOUNCE, NodePaths(told.output, told.node).attempts, stop_line(caller()))
        ended.append(EndedContainer(engine.stop(state.id, grace), True))
    return ended


def _collect(engines: Sequence[Engine], ended: Sequence[Ended], into: Record, warn: Callable[[str], None]) -> None:
    """The files of all that ran."""
    folders: dict[tuple[str, str], OutputFolder] = {}
    for engine, outcome in zip(engines, ended, strict=True):
        containers = [] if isinstance(outcome, LauncherError) else outcome
        outputs = {labels.read(c.state.labels).output for c in containers if c.state.phase is not Phase.CREATED}
        folders |= {(engine.host, output): OutputFolder(engine.files, output, (engine.node,)) for output in outputs}
    if folders and into.unmasked:
        warn(into.unmasked)
    for result in collect(list(folders.values()), into.paths.root, mask=into.mask):
        for problem in (result,) if isinstance(result, LauncherError) else result.problems:
            warn(f"not brought here: {problem}")


def _remove(engine: Engine, ended: Ended) -> Removed:
    if isinstance(ended, LauncherError):
        raise ended

    def remove() -> None:
        for container in ended:
            engine.remove(container.state.id)

    started = [container.state.started for container in ended if container.state.started]
    _, swept = run_both(remove, lambda: engine.sweep_shared_memory(min(started)) if started else ())
    return Removed(engine.node, tuple(ended), tuple(swept))
