"""Stop a run and remove it from all nodes. Idempotent; reports nodes that did not confirm."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launcher.errors import ContainerGone, EngineFailed, LauncherError, NodesFailed, NodeUnfit, NotConfirmed
from launcher.extras import in_words, warn_on_error
from launcher.local_files import read_end
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.labels import RunLabels
from launcher.model.plan import RunId
from launcher.model.progress import silent
from launcher.model.sizes import size_text
from launcher.naming import first_of
from launcher.node import output_folder
from launcher.node.connect import connect
from launcher.node.engine import Engine
from launcher.node.files import FileEntry
from launcher.node.parallel import in_background, run_all, run_all_catching, run_both
from launcher.node.shared_memory import Shared
from launcher.records.collect import OutputFolder, collect, output_folders
from launcher.records.paths import NodePaths, as_shown
from launcher.records.store import PURGED, STOPPING, Record
from launcher.records.workdir import SentCode, list_sent, remove_sent
from launcher.records.written import not_fetched
from launcher.records.written import unfetched as only_there
from launcher.run.end.fetch import not_brought
from launcher.run.locate import Attached, Note, Owner, caller, list_runs, unsearched
from launcher.run.result import Failure, NodeResult
from launcher.run.state import BUDGET, SIGKILL_CODE, RunState, at_budget, state_of
from launcher.run.watch import attempts

LEFT_IN_MEMORY = "left in shared memory"  # event
_NAMED = 5  # files
ANNOUNCED_WITHIN = 3.0  # seconds that a stop waits for attached launchers to be told; a home folder may hang
# Seconds in which programs save a checkpoint on SIGTERM. Inner layers are faster: torchrun gives its workers 40 s
# (planning.command.SAVING), the trainer a step 25 s (train.deadline).
GRACE = 45.0


@dataclass(frozen=True)
class EndedContainer:
    state: ContainerState
    stopped: bool  # by stop(); False: it had exited before, or never started


@dataclass(frozen=True)
class Kept:
    """A container, or with --purge an output folder, that `down` has left, as it has files that were not fetched.

    what: the path of the folder, or `container NAME`. why: its files could not be listed; "" if they were.
    """

    what: str
    unfetched: Sequence[FileEntry]
    why: str = ""

    def __str__(self) -> str:
        return f"{self.what} is kept: {not_fetched(self.unfetched) if self.unfetched else self.why}"


@dataclass(frozen=True)
class Removed:
    """The containers and shared memory files that a node confirmed as removed, and what is kept there.

    left_in_shm: other files in shared memory, which may be the run's.
    """

    node: str
    containers: tuple[EndedContainer, ...]
    cleared: tuple[str, ...]
    kept: tuple[Kept, ...] = ()
    left_in_shm: tuple[Shared, ...] = ()

    @property
    def left_in_words(self) -> str:
        """What is left in shared memory, as a sentence; "" for nothing."""
        if not self.left_in_shm:
            return ""
        named = [f"{each.name} ({size_text(each.size)})" for each in self.left_in_shm]
        return f"left in /dev/shm: {first_of(named, _NAMED)}; to remove them: launcher clean --shared-memory"


def stop(
    engines: Sequence[Engine],
    run: RunId,
    *,
    code: SentCode | None,
    record: Record | None = None,
    grace: float = GRACE,
) -> Sequence[Removed]:
    """Stop and remove all containers of the run on these nodes, its files in shared memory, and its unchanged code.

    code: the files of the code that was sent; None: keep everything in the working directories. record: the run's, to
    keep containers with files that only they have; None: keep none. Raises NodesFailed with every node on which a step
    failed.
    """
    ended = run_all_catching([partial(_end_own, engine, run, grace) for engine in engines])
    outcomes = run_all_catching([partial(_remove, *pair, code, record) for pair in zip(engines, ended, strict=True)])
    if record is not None:
        outcomes = _note_left(record, engines, outcomes)
    failures = [outcome for outcome in outcomes if isinstance(outcome, LauncherError)]
    if failures:
        raise NodesFailed(failures, of=len(engines))
    return [outcome for outcome in outcomes if isinstance(outcome, Removed)]


def _note_left(
    record: Record, engines: Sequence[Engine], outcomes: Sequence[Removed | LauncherError]
) -> list[Removed | LauncherError]:
    """Record what is left in shared memory, as `clean` removes nothing else there; return it once for each machine."""
    hosts, found = set[str](), list[Removed | LauncherError]()
    for engine, outcome in zip(engines, outcomes, strict=True):
        if isinstance(outcome, LauncherError) or not outcome.left_in_shm:
            found.append(outcome)
        elif engine.host in hosts:
            found.append(replace(outcome, left_in_shm=()))
        else:
            hosts.add(engine.host)
            record.event(LEFT_IN_MEMORY, host=engine.host, files=outcome.left_in_shm)
            found.append(outcome)
    return found


EndOfNode = Sequence[EndedContainer] | LauncherError


def _end_own(engine: Engine, run: RunId, grace: float) -> Sequence[EndedContainer]:
    """End this user's containers of a run on a node, where nobody has to be told who does."""
    own = engine.list({labels.RUN: run, labels.UID: str(engine.uid())})
    return _end(engine, [state for state in own if labels.readable(state.labels)], grace, silent)


def _end(
    engine: Engine, listed: Sequence[ContainerState], grace: float, warn: Callable[[str], None]
) -> Sequence[EndedContainer]:
    """End containers of a run on a node. warn: called if other launchers could not be told who does.

    Those that another process has removed since they were listed are left out.
    """
    ended = []
    for state in engine.to_stop(listed):
        with suppress(ContainerGone):
            ended.append(_end_one(engine, state, grace, warn))
    return ended


def _end_one(engine: Engine, state: ContainerState, grace: float, warn: Callable[[str], None]) -> EndedContainer:
    # A queued cluster job is also CREATED, but has a reason in `error`, and launchers may be waiting for it.
    unstarted = state.phase is Phase.CREATED and not state.error
    if state.phase.ended or (unstarted and (_is_claim(state) or _removed_unstarted(engine, state))):
        return EndedContainer(state, stopped=False)
    telling = in_background(partial(_announce, engine, labels.read(state.labels)))
    telling.wait(ANNOUNCED_WITHIN)
    ended = EndedContainer(engine.stop(state.id, grace), stopped=True)
    problem = telling() if telling.wait(0) else "its output folder does not respond"
    if problem:
        warn(f"{engine.node}: could not tell other launchers who stopped it: {problem}")
    return ended


def _is_claim(state: ContainerState) -> bool:
    """Whether it locks a port or GPUs, and never starts; it is removed last."""
    return state.labels.get(labels.PURPOSE) == "claim"


def _removed_unstarted(engine: Engine, state: ContainerState) -> bool:
    """Remove a container that has never started; False if `up` has started it since it was listed."""
    try:
        engine.remove(state.id)
    except EngineFailed:
        return False
    return True


def _announce(engine: Engine, run: RunLabels) -> str:
    """Tell attached launchers who stops the run. Return the reason if that failed, else ""."""
    try:
        engine.files.append(NodePaths(run.output, run.node).attempts, attempts.stop_line(caller()), below=run.output)
    except LauncherError as error:
        return error.what
    except Exception as error:  # noqa: BLE001 - said
        return in_words(error)
    return ""


def _collect(
    engines: Sequence[Engine], ended: Sequence[EndOfNode], into: Record, warn: Callable[[str], None]
) -> set[Engine]:
    """Collect the files of all containers that ran. Return the engines on which nothing could be read."""
    shared: dict[tuple[str, str], list[tuple[Engine, str]]] = {}  # of each folder: the nodes that write to it
    for engine, outcome in zip(engines, ended, strict=True):
        containers = [] if isinstance(outcome, LauncherError) else outcome
        for run in (labels.read(c.state.labels) for c in containers if c.state.phase is not Phase.CREATED):
            shared.setdefault((engine.host, run.output), []).append((engine, run.node))
    if shared and into.unmasked:
        warn(into.unmasked)
    folders = [
        OutputFolder(nodes[0][0].files, path, tuple(name for _, name in nodes)) for (_, path), nodes in shared.items()
    ]
    unread: set[Engine] = set()
    results = collect(folders, into.paths.root, mask=into.mask, code=into.sent_code)
    for nodes, result in zip(shared.values(), results, strict=True):
        for problem in (result,) if isinstance(result, LauncherError) else result.problems:
            warn(f"not downloaded: {problem}")
        if isinstance(result, LauncherError):
            unread |= {engine for engine, _ in nodes}
    return unread


def _killed(attached: Attached, ended: Mapping[Engine, EndOfNode]) -> Iterator[str]:
    """Yield the stopped nodes, and ranks of them, that got SIGKILL. Their files have been collected.

    Not a node whose ranks had all exited: it had nothing to save.
    """
    root = attached.record.paths.root
    for node in attached.nodes:
        containers = ended.get(attached.engines[node.name], ())
        stopped = [] if isinstance(containers, LauncherError) else [one.state for one in containers if one.stopped]
        if not stopped:
            continue
        tried = attempts.parse(read_end(NodePaths(str(root), node.name).attempts, attempts.LIMIT))
        if tried and tried[-1].ranks_had_exited:
            continue
        if any(one.exit_code == SIGKILL_CODE and labels.read(one.labels).node == node.name for one in stopped):
            yield node.name
        else:
            yield from (f"rank {rank} on {node.name}" for rank in sorted(tried[-1].killed if tried else ()))


def _remove(engine: Engine, ended: EndOfNode, code: SentCode | None, record: Record | None) -> Removed:
    """record: as for `stop`. The locks of a container that is kept are removed."""
    if isinstance(ended, LauncherError):
        raise ended
    started = [container.state.started for container in ended if container.state.started]
    states = [container.state for container in ended]
    removing = partial(_remove_containers, engine, states, code, record)
    kept, cleared = run_both(removing, lambda: engine.clear_shared_memory(min(started)) if started else ())
    left = engine.shared_memory(min(started)) if started else ()
    if left and runs_there(engine):
        left = ()  # they may be another run's
    return Removed(engine.node, tuple(ended), tuple(cleared), tuple(kept), tuple(left))


def _remove_containers(
    engine: Engine, states: Sequence[ContainerState], code: SentCode | None, record: Record | None
) -> list[Kept]:
    """Remove ended containers and the unchanged code; return those that are kept. record: as for `stop`."""
    kept = []
    for state in states:
        ran = state.phase is not Phase.CREATED and not _is_claim(state)
        if record is not None and ran and (left := kept_container(engine, state, record)):
            kept.append(left)  # with its code: the engine reads files only while the folders that it mounts exist
            continue
        if code is not None and not _is_claim(state):  # first: once there is no container, nothing would find it
            _remove_code(engine, state, code)
        engine.remove(state.id)
    return kept


def remove_ended(attached: Attached) -> bool:
    """Remove the containers of a run that has ended and whose files were collected, except those with files of their
    own. Its output folders stay, and shared memory is left alone: another run may have started. Return whether any was
    removed. Raises NodesFailed.
    """
    record, engines = attached.record, [*attached.listed]
    if attached.unreachable or any(not state.phase.ended for state in attached.states.values()):
        return False
    one = partial(_remove_containers, code=record.sent_code, record=record)
    kept = run_all([partial(one, engine, attached.listed[engine]) for engine in engines])
    names = [engine.node for engine, left in zip(engines, kept, strict=True) if left]
    record.event("down", removed=[engine.node for engine in engines], failed=[], kept=names)
    return sum(map(len, attached.listed.values())) > sum(map(len, kept))


def runs_there(engine: Engine) -> bool:
    """Whether a run of this user may be using shared memory on a node."""
    own = {labels.RUN: None, labels.UID: str(engine.uid()), labels.NODE: None}  # a machine can have several nodes
    live = [state for state in engine.list(own) if not state.phase.ended]
    return any(state.labels.get(labels.PURPOSE) != "claim" for state in live)


def kept_container(engine: Engine, state: ContainerState, record: Record) -> Kept | None:
    """Return what keeps a run's container: files that only it has, or that it is unknown whether it has some."""
    what = f"container {state.name}"
    try:
        left = not_brought(engine, labels.read(state.labels).node, state.id, record)
    except Exception as error:  # noqa: BLE001 - said
        return Kept(what, (), in_words(error))
    return Kept(what, left) if left else None


def _remove_code(engine: Engine, state: ContainerState, code: SentCode) -> None:
    """Remove the unchanged code from the node's working directory. If that is not possible, it stays there."""
    run = labels.read(state.labels)
    with suppress(Exception):
        remove_sent(engine.files, run.output, run.node, list_sent(engine.files, run.output, run.node, code))


def take_down(
    attached: Attached,
    warn: Callable[[str], None],
    failed_before: Callable[[], Failure | None],
    *,
    purge: bool,
    unfetched: bool,
    collected: bool,
) -> tuple[list[Removed], list[LauncherError]]:
    """Stop the run and remove it from the nodes that have just listed it; return what was removed, and the errors.

    purge: also remove output folders. unfetched: also those, and containers, that have files which are only there. Logs
    and curves are collected first; warn: called for each file that could not be collected, which stays in the output
    folder. failed_before: called then, returns the failure of a node while others still ran. collected: files have
    just been collected, as all containers had ended. Records the outcome if no launcher did.
    """
    options = " --purge" * purge + " --unfetched" * unfetched
    record, errors = attached.record, [*attached.unreachable.values(), *_not_asked(attached, options)]
    code = None if purge and unfetched else record.sent_code
    engines = [*attached.listed]
    record.event(STOPPING)
    ended = run_all_catching([partial(_end, engine, attached.listed[engine], GRACE, warn) for engine in engines])
    unread: set[Engine] = set()
    failure: Failure | None = None
    if collected and record.unmasked:
        warn(record.unmasked)
    if attached.owner is not Owner.OTHER and not collected:  # do not read another user's files
        collecting = partial(_collect, engines, ended, record, warn)
        unread = warn_on_error("not downloaded", collecting, {*engines}, warn)
        for who in _killed(attached, dict(zip(engines, ended, strict=True))):
            warn(f"{who} did not exit in time after SIGTERM and was killed: what it was saving may be incomplete")
        if failure := warn_on_error("whether a node had failed before is not known", failed_before, None, warn):
            who = failure.node if failure.rank is None else f"rank {failure.rank} on {failure.node}"
            warn(record.mask(f"{who} had failed before the run was stopped: {failure.what}"))
    removing = [
        partial(_remove, engine, outcome, None if engine in unread else code, None if unfetched else record)
        for engine, outcome in zip(engines, ended, strict=True)
    ]
    outcomes = _note_left(record, engines, run_all_catching(removing))
    removed = [outcome for outcome in outcomes if isinstance(outcome, Removed)]
    errors += [outcome for outcome in outcomes if isinstance(outcome, LauncherError)]
    if purge:
        confirmed = [engine for engine, outcome in zip(engines, outcomes, strict=True) if isinstance(outcome, Removed)]
        every = unfetched or attached.owner is Owner.OTHER  # of another user: the error says that it is not removed
        removed, problems = _purge(attached, confirmed, removed, unfetched=every)
        errors += problems
    elif code is None and any(one.containers for one in removed):
        why = f"{as_shown(record.paths.code)} is missing, which tells the code from what the program wrote"
        warn(f"the working directories were kept as they are: {why}")
    if problem := _conclude(record, removed, errors, attached.states.values(), failure):
        warn(problem)
    return removed, errors


def _purge(
    attached: Attached, confirmed: Collection[Engine], removed: Sequence[Removed], *, unfetched: bool
) -> tuple[list[Removed], list[LauncherError]]:
    """Delete the output folders of the engines that confirmed; return `removed` with those that are kept, and errors.

    unfetched: also folders with files that are only there.
    """
    nodes = [node for node in attached.nodes if attached.engines[node.name] in confirmed]
    folders = output_folders(attached.engines, nodes)
    using = {one.node for one in removed if one.kept}  # nodes with a container that is kept
    used = [any(attached.engines[name].node in using for name in folder.nodes) for folder in folders]
    record = attached.record
    purging = [partial(_purge_folder, *pair, record, unfetched=unfetched) for pair in zip(folders, used, strict=True)]
    kept, errors = dict[str, Kept](), list[LauncherError]()
    for folder, outcome in zip(folders, run_all_catching(purging), strict=True):
        engine = attached.engines[folder.node]
        if outcome is None:
            record.event(PURGED, host=engine.host, by=caller(), command="down --purge")
        elif isinstance(outcome, Kept):
            kept[engine.node] = outcome
        else:
            errors.append(outcome)
    # once: `local` can have two engines
    return [replace(o, kept=(*o.kept, kept.pop(o.node))) if o.node in kept else o for o in removed], errors


def _purge_folder(folder: OutputFolder, used: bool, record: Record, *, unfetched: bool) -> Kept | None:
    """Delete an output folder; if it is kept, say so. used: by a container that is kept. Raises NodeUnfit, ..."""
    if used:
        return Kept(folder.path, (), "its container, which is kept, uses it")
    if not unfetched:
        try:
            left = only_there(folder.files.scan(folder.path), record)
        except NodeUnfit as error:
            return Kept(folder.path, (), error.what)
        if left:
            return Kept(folder.path, left)
    output_folder.remove(folder.files, folder.path, record.run)
    return None


def _conclude(
    record: Record,
    removed: Sequence[Removed],
    errors: Sequence[LauncherError],
    states: Collection[ContainerState] = (),
    failure: Failure | None = None,
) -> str:
    """Record a `down`, and the run's end if no launcher did. Return the reason if that failed, else "".

    states: of the containers that still existed. failure: of a node, before it was stopped.
    """
    kept = [r.node for r in removed if any(each.what.startswith("container ") for each in r.kept)]
    record.event("down", removed=[r.node for r in removed], failed=[str(e) for e in errors], kept=kept)
    if errors or record.result() is not None:
        return ""
    # if it was running, it is now stopped
    budget = attempts.ended_by_budget(record.paths.root, record.nodes())  # of the files that were collected
    nodes = len(record.nodes()) + len(record.other_hosts())
    state = state_of(at_budget(states, budget), nodes, min_nodes=record.min_nodes)
    ended = state if state.ended else RunState.STOPPED
    by = {"ended_by": BUDGET} if budget and ended is RunState.DONE else {}
    return record.finish(
        {"state": ended, "exit_code": ended.exit_code, "nodes": _results(removed), "failure": failure, **by}
    )


def _results(removed: Sequence[Removed]) -> list[NodeResult]:
    """Return how each node ended, by its rank, as far as its removed container tells."""
    found = list[NodeResult]()
    for state in (each.state for one in removed for each in one.containers if each.state.started):
        own = labels.read(state.labels)
        result = NodeResult(own.node, own.rank, state.exit_code, state.oom_killed, state.restarts)
        if own.purpose == "run":
            found.append(replace(result, started=state.started, finished=state.finished or None))
    return sorted(found, key=lambda node: node.rank)


@dataclass(frozen=True)
class Remaining:
    """What is left of several runs. runs: those with containers, locks, or folders to purge, on nodes that answered.

    foreign: such runs that were not started in this folder: without a record here, or with a rebuilt one. skipped:
    number of runs of which nothing is left. errors: of nodes that may have something of the other runs. no_engine: why
    the container engine of `local` was not searched, which was to be.
    """

    runs: Sequence[RunId]
    foreign: Sequence[RunId]
    skipped: int
    errors: Sequence[LauncherError]
    no_engine: LauncherError | None = None


def remaining_on(hosts: Sequence[str], known: Sequence[Record], ssh_config: Path | None, note: Note) -> Remaining:
    """Ask these nodes for all runs that have containers there. known: those that are recorded here."""
    with connect([(host, host) for host in hosts], None, ssh_config, allow_failures=True) as fleet:
        listing = list_runs(fleet, note)
    no_engine = unsearched(fleet, lambda: known)
    ours = {record.run for record in known if not record.rebuilt}
    runs = [run for run in listing.runs if run in ours]
    foreign = [run for run in listing.runs if run not in ours]
    return Remaining(runs, foreign, 0, [*listing.failed.values()], no_engine)


def remaining(known: Sequence[Record], ssh_config: Path | None, note: Note, *, purge: bool) -> Remaining:
    """Ask each node of these recorded runs once what is left of them, and record the end of those without anything.

    A run that was removed from every node before needs no answer. purge: output folders count, too.
    """
    open_ = [record for record in known if not record.confirmed_down or purge]
    hosts = dict.fromkeys(host for record in open_ for host in _hosts(record))
    runtimes = {record.runtime for record in open_}
    runtime = runtimes.pop() if len(runtimes) == 1 else None
    with connect([(host, host) for host in hosts], runtime, ssh_config, allow_failures=True) as fleet:
        listing = list_runs(fleet, note, claims=True)
        answering = [engine for engine in fleet.engines if engine.node not in listing.failed]
        folders = run_all_catching([partial(output_folder.runs, engine.files) for engine in answering] if purge else [])
    purged = {run for found in folders if not isinstance(found, LauncherError) for run in found}
    runs, foreign, skipped = list[RunId](), list[RunId](), 0
    errors: dict[str, LauncherError] = {}
    for record in known:
        missing = listing.unanswered(record, _hosts(record))
        if record.run in {*listing.runs, *listing.locked, *purged}:
            (foreign if record.rebuilt else runs).append(record.run)
        elif missing and not record.confirmed_down:
            note(f"{record.run} may still be running on {', '.join(missing)}")
            errors |= missing
        else:
            skipped += 1
            if record.result() is None:
                _conclude(record, (), ())
    return Remaining(runs, foreign, skipped, [*errors.values()])


def _hosts(record: Record) -> list[str]:
    return [*(node.host for node in record.nodes()), *record.other_hosts()]


def _not_asked(attached: Attached, options: str) -> list[LauncherError]:
    """Return an error for the nodes of the run that the user did not name, if any. options: of the command."""
    run, missing, every = attached.record.run, attached.not_asked, attached.hosts
    if not missing:
        return []
    what = f"{len(missing)} of its {len(every)} nodes {'was' if len(missing) == 1 else 'were'} not contacted: "
    options += " --any-owner" * (attached.owner is Owner.OTHER)
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
