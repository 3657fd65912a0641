"""Ending a run on every node and leaving nothing of it there: idempotent; nodes that did not confirm are named."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from launcher.errors import LauncherError, NodesFailed, NodeUnfit, NotConfirmed
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.plan import RunId
from launcher.node import output_folder
from launcher.node.connect import Fleet
from launcher.node.engine import Engine
from launcher.node.parallel import run_all, run_all_settled, run_both
from launcher.records.collect import OutputFolder, collect, output_folders
from launcher.records.paths import NodePaths
from launcher.records.store import Record
from launcher.run.attempts import ANNOUNCE, stop_line
from launcher.run.locate import Attached, Owner, caller
from launcher.run.state import RunState, state_of

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
    for state in engine.apart(listed):
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
            warn(f"not downloaded: {problem}")


def _remove(engine: Engine, ended: Ended) -> Removed:
    if isinstance(ended, LauncherError):
        raise ended

    def remove() -> None:
        for container in ended:
            engine.remove(container.state.id)

    started = [container.state.started for container in ended if container.state.started]
    _, swept = run_both(remove, lambda: engine.sweep_shared_memory(min(started)) if started else ())
    return Removed(engine.node, tuple(ended), tuple(swept))


def take_down(
    attached: Attached, warn: Callable[[str], None], *, purge: bool
) -> tuple[list[Removed], list[LauncherError]]:
    """Stop the run and remove it on the nodes that answer; what was removed, and why the rest was not.

    purge: output folders too. Its logs and curves are collected first. An end that nobody saw is recorded.
    """
    record, errors = attached.record, [*attached.unreachable.values(), *_not_asked(attached, purge=purge)]
    removed: list[Removed] = []
    try:
        into = None if attached.owner is Owner.OTHER else record  # another user's files are not ours to read
        removed = stop(attached.fleet, record.run, into=into, warn=warn, listed=attached.listed)
        if purge:
            folders = output_folders(attached.engines, attached.nodes)
            run_all([partial(output_folder.remove, folder.files, folder.path, record.run) for folder in folders])
    except NodesFailed as error:
        errors += error.errors
    record.event("down", removed=[r.node for r in removed], failed=[str(e) for e in errors])
    if record.result() is None and not errors:  # no launcher saw its end: it was stopped, where it still ran
        state = state_of(attached.states.values(), len(attached.nodes), min_nodes=record.min_nodes)
        ended = state if state.ended else RunState.STOPPED
        if problem := record.finish({"state": ended, "exit_code": ended.exit_code}):
            warn(problem)
    return removed, errors


def _not_asked(attached: Attached, *, purge: bool) -> list[LauncherError]:
    """The error for nodes of the run that the user did not name, if there are any."""
    run, missing, every = attached.record.run, attached.not_asked, attached.hosts
    if not missing:
        return []
    what = f"{len(missing)} of its {len(every)} nodes {'was' if len(missing) == 1 else 'were'} not asked: "
    options = " --purge" * purge + " --any-owner" * (attached.owner is Owner.OTHER)
    command = f"launcher down {run} --nodes {shlex.quote(labels.SPLIT.join(dict.fromkeys(every)))}{options}"
    return [NotConfirmed(run, what + ", ".join(missing), f"to end it there too: {command}")]


def not_confirmed(removed: Sequence[Removed], errors: Sequence[LauncherError]) -> NotConfirmed:
    """The error for nodes on which a run, or several, could not be ended."""
    words = "not every node confirmed:\n" + str(NodesFailed(errors))
    kinds = {type(error) for error in errors}
    fix = "repeat it when they are back"
    if kinds <= {NotConfirmed, NodeUnfit}:
        fix = "" if kinds == {NotConfirmed} else "mend that, then repeat it"
    return NotConfirmed("down", words, fix, removed=removed, errors=errors)
