"""Stop a run and remove it from all nodes. Idempotent; reports nodes that did not confirm."""

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

GRACE = 45.0  # seconds; the trainer saves a checkpoint on SIGTERM, for which torchrun gives its workers 30 s


@dataclass(frozen=True)
class EndedContainer:
    state: ContainerState
    stopped: bool  # by stop(); False: it had exited before, or never started


@dataclass(frozen=True)
class Removed:
    """The containers and shared memory files that a node confirmed as removed."""

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
    """Stop and remove all containers of the run on these nodes, and its files in shared memory.

    into: the record into which logs and curves are collected first. warn: called for each file that could not be
    collected; it stays in the output folder. listed: the run's containers and locks, if the caller has just listed
    them.
    Raises NodesFailed with every node on which a step failed.
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
    for state in engine.to_stop(listed):
        # A queued cluster job is also CREATED, but has a reason in `error`, and launchers may be waiting for it.
        if state.phase.ended or (state.phase is Phase.CREATED and not state.error):
            ended.append(EndedContainer(state, False))
            continue
        run_labels = labels.read(state.labels)
        # Before the stop, so that attached launchers know who stopped the run.
        engine.sh(ANNOUNCE, NodePaths(run_labels.output, run_labels.node).attempts, stop_line(caller()))
        ended.append(EndedContainer(engine.stop(state.id, grace), True))
    return ended


def _collect(engines: Sequence[Engine], ended: Sequence[Ended], into: Record, warn: Callable[[str], None]) -> None:
    """Collect the files of all containers that ran."""
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
    """Stop the run and remove it from the reachable nodes; return what was removed, and the errors.

    purge: also remove output folders. Logs and curves are collected first. Records the outcome if no launcher did.
    """
    record, errors = attached.record, [*attached.unreachable.values(), *_not_asked(attached, purge=purge)]
    removed: list[Removed] = []
    try:
        into = None if attached.owner is Owner.OTHER else record  # do not read another user's files
        removed = stop(attached.fleet, record.run, into=into, warn=warn, listed=attached.listed)
        if purge:
            folders = output_folders(attached.engines, attached.nodes)
            run_all([partial(output_folder.remove, folder.files, folder.path, record.run) for folder in folders])
    except NodesFailed as error:
        errors += error.errors
    record.event("down", removed=[r.node for r in removed], failed=[str(e) for e in errors])
    if record.result() is None and not errors:  # no launcher recorded the outcome: if it was running, it is now stopped
        state = state_of(attached.states.values(), len(attached.nodes), min_nodes=record.min_nodes)
        ended = state if state.ended else RunState.STOPPED
        if problem := record.finish({"state": ended, "exit_code": ended.exit_code}):
            warn(problem)
    return removed, errors


def _not_asked(attached: Attached, *, purge: bool) -> list[LauncherError]:
    """Return an error for the nodes of the run that the user did not name, if any."""
    run, missing, every = attached.record.run, attached.not_asked, attached.hosts
    if not missing:
        return []
    what = f"{len(missing)} of its {len(every)} nodes {'was' if len(missing) == 1 else 'were'} not contacted: "
    options = " --purge" * purge + " --any-owner" * (attached.owner is Owner.OTHER)
    command = f"launcher down {run} --nodes {shlex.quote(labels.SPLIT.join(dict.fromkeys(every)))}{options}"
    return [NotConfirmed(run, what + ", ".join(missing), f"to stop it on all nodes, run: {command}")]


def not_confirmed(removed: Sequence[Removed], errors: Sequence[LauncherError]) -> NotConfirmed:
    """Return the error for nodes on which runs could not be stopped."""
    what = "not every node confirmed:\n" + str(NodesFailed(errors))
    kinds = {type(error) for error in errors}
    fix = "repeat the command once all nodes are reachable again"
    if kinds <= {NotConfirmed, NodeUnfit}:
        fix = "" if kinds == {NotConfirmed} else "fix the errors, then repeat the command"
    return NotConfirmed("down", what, fix, removed=removed, errors=errors)
