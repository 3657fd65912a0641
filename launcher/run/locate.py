"""Find a run by its local record or by the labels of its containers (`--nodes a,b`), and determine its owner."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from pathlib import Path

from launcher.errors import EngineAbsent, LauncherError, NodesFailed, NoRoomHere, RunUnknown, UsageError
from launcher.model import labels
from launcher.model.container import ContainerState, Phase
from launcher.model.home import user_name
from launcher.model.host import cluster_name
from launcher.model.labels import RunLabels
from launcher.model.plan import RunId, is_run_id
from launcher.node import output_folder
from launcher.node.connect import LOCAL, Fleet, connect
from launcher.node.engine import Engine
from launcher.node.parallel import run_all_catching, run_both
from launcher.records import store
from launcher.records.groups import begun_by
from launcher.records.paths import RunPaths, as_shown
from launcher.records.store import NodeOfRun, Record

Note = Callable[[str], None]  # reports containers that were found but ignored


class Owner(IntEnum):
    """Owner of a run, by the ssh user's uid on the node and, if no run is named, by the caller. Closest first."""

    SELF = 0  # this user of the node, and this caller
    ACCOUNT = 1  # this user of the node, another caller
    OTHER = 2  # another user of the node


def caller() -> str:
    """Return user@host, in a form that is valid in a label."""
    return re.sub(r"[^!-~]", "_", f"{user_name()}@{socket.gethostname()}")[:400]


@dataclass(frozen=True)
class Found:
    """A container on a node with valid launcher labels."""

    labels: RunLabels
    owner: Owner
    engine: Engine
    state: ContainerState

    @property
    def node(self) -> NodeOfRun:
        run = self.labels
        return NodeOfRun(run.node, self.engine.host, run.rank, self.state.name, run.output, run.ranks)


@dataclass(frozen=True)
class Attached:
    """A run with connections to its nodes; unreachable nodes are in `unreachable`."""

    record: Record
    nodes: tuple[NodeOfRun, ...]  # by rank, reachable ones only
    engines: Mapping[str, Engine]  # by the node's name in the run
    fleet: Fleet
    states: Mapping[str, ContainerState] = field(default_factory=dict)  # by node name; without removed containers
    unreachable: Mapping[str, LauncherError] = field(default_factory=dict)
    # by engine that answered: those that the user may remove
    listed: Mapping[Engine, Sequence[ContainerState]] = field(default_factory=dict)
    owner: Owner = Owner.SELF
    started_by: str = ""  # user@host of the caller, and the uid on the node; "" if unknown
    hosts: tuple[str, ...] = ()  # of all its nodes, as the caller addressed them; () if unknown
    not_asked: tuple[str, ...] = ()  # hosts that the user did not name

    @property
    def size(self) -> int:
        """Number of nodes of the run, also of those that have no container any more or were not asked."""
        return max(len(self.record.nodes()), len(self.nodes) + len(self.unreachable) + len(self.elsewhere))

    @property
    def elsewhere(self) -> Sequence[str]:
        """Hosts of the nodes that a record rebuilt from labels lacks: they have no container, or were not asked."""
        return [host for host in self.record.other_hosts(self.nodes) if host not in self.unreachable]

    @property
    def may_lose(self) -> int:
        """Number of nodes that the run can lose."""
        least = self.record.min_nodes
        return self.size - least if least else 0

    def require_all(self) -> None:
        """Raise NodesFailed if a node is unreachable."""
        if self.unreachable:
            raise NodesFailed(list(self.unreachable.values()))

    def require_any(self) -> None:
        """Raise NodesFailed if no node is reachable."""
        if not self.nodes:
            self.require_all()

    def node(self, wanted: str) -> NodeOfRun:
        """Return a node by name or host. Raises UsageError if unknown, its LauncherError if unreachable."""
        if wanted in self.unreachable:
            raise self.unreachable[wanted]
        for node in self.nodes:
            if wanted in (node.name, node.host):
                return node
        raise UsageError("--node", f"{wanted}: the run's nodes are {', '.join(node.name for node in self.nodes)}")


def connected_run(record: Record, fleet: Fleet) -> Attached:
    """Return a recorded run with connections to its nodes; call `find_containers` for the state of its containers."""
    by_name = {engine.node: engine for engine in fleet.engines}
    nodes = tuple(node for node in record.nodes() if engine_of(node)[0] not in fleet.failed)
    engines = {node.name: by_name[engine_of(node)[0]] for node in nodes}
    return Attached(record, nodes, engines, fleet, unreachable=fleet.failed)


def connect_run(record: Record, ssh_config: Path | None) -> Attached:
    """Connect to the nodes of a recorded run; unreachable nodes are in `unreachable`."""
    hosts = [engine_of(node) for node in record.nodes()] + [(host, host) for host in record.other_hosts()]
    return connected_run(record, connect(list(dict.fromkeys(hosts)), record.runtime, ssh_config, allow_failures=True))


def find_on_nodes(text: str | None, hosts: Sequence[str], ssh_config: Path | None, note: Note, runs: Path) -> Attached:
    """Find the run that matches `text` by its container labels on these nodes, and rebuild its local record.

    Raises RunUnknown, NodesFailed, NoRoomHere.
    """
    fleet = connect([(host, host) for host in dict.fromkeys(hosts)], None, ssh_config, allow_failures=True)
    try:
        listing = list_runs(fleet, note)
        where = "on " + ", ".join(hosts)
        if text not in listing.runs:  # a complete ID means no other run
            warn_of_unsearched(fleet, partial(store.records, runs), note)
        try:
            found = listing.runs[_choose(text, listing, fleet, where)]
        except RunUnknown as unknown:
            raise _only_files(text, fleet, runs) or unknown from None
        run, nodes = found[0].labels, tuple(f.node for f in found)
        recorded = bool(Record(RunPaths(runs / run.run)).nodes())
        try:
            record = Record.rebuild(
                run.run,
                run.runtime,
                nodes,
                runs,
                min_nodes=run.min_nodes,
                spares=run.spares,
                hosts=run.hosts,
                group=run.group,
            )
        except OSError as error:
            what = f"no record can be made in {as_shown(runs)}/: {error.strerror}"
            raise NoRoomHere("this machine", what, "repeat the command in another folder") from error
        if not recorded:
            note(f"not recorded here before: a record is made in {as_shown(runs)}/, from the labels of its containers")
        engines = {f.node.name: f.engine for f in found}
        missing = not_asked(found, hosts)
        unreachable = {**listing.failed, **listing.unanswered(record, record.other_hosts(nodes))}
        return Attached(record, nodes, engines, fleet, unreachable=unreachable, not_asked=missing)
    except BaseException:
        fleet.close()
        raise


def _only_files(text: str | None, fleet: Fleet, runs: Path) -> RunUnknown | None:
    """Return the error for a run that has files on these nodes, but no container any more; None for any other run.

    runs: folder of the records.
    """
    if text is None or not is_run_id(text):
        return None
    asked = {engine.host: engine for engine in fleet.engines}  # `local` can have two engines
    found = {host: path for host, engine in asked.items() if (path := output_folder.find(engine.files, text))}
    if not found:
        return None
    where = ", ".join(f"{path} on {host}" for host, path in found.items())
    if Record(RunPaths(runs / text)).nodes():
        what = f"its containers are removed; its files are in {where}"
        return RunUnknown(text, what, "omit --nodes: it is recorded here")
    first, path = next(iter(found.items()))
    return RunUnknown(
        text,
        f"its containers are removed, and no record of it is here; its files are in {where}",
        f"in the folder where `up` started it: launcher fetch {text} --checkpoints; or by hand: "
        f"{copy_by_hand(first, path)}",
    )


def copy_by_hand(host: str, path: str) -> str:
    """Return a command that copies a folder of a node to the current folder."""
    return f"cp -r {shlex.quote(path)} ." if host == LOCAL else f"scp -r {shlex.quote(f'{host}:{path}')} ."


def find_containers(attached: Attached, note: Note, *, claims: bool = False, any_owner: bool = False) -> Attached:
    """Return `attached` with the current state of the run's containers, in one round trip.

    Nodes that fail to list them are moved to `unreachable`. claims: also list the run's GPU locks. any_owner: allow
    removing containers of other users.
    """
    run = attached.record.run
    listed, failed = _list(attached.fleet, run, note, claims=claims)
    found = _by_run(listed).get(run, [])
    owner = min((f.owner for f in found), default=Owner.SELF)
    started_by = found[0].labels.started_by if found else ""
    if owner is Owner.OTHER:
        note(f"{run} belongs to another user, {started_by}: its files may not be readable")
    known = [node for node in attached.nodes if attached.engines[node.name] not in failed]
    others = [f for f in found if f.node.name not in attached.engines]  # not in the local record
    removable = [f for f in listed if f.labels.run == run and (any_owner or f.owner is not Owner.OTHER)]
    answered = [engine for engine in attached.fleet.engines if engine not in failed]
    answering = {engine.node for engine in answered}
    unreachable = {name: error for name, error in attached.unreachable.items() if name not in answering}
    for engine, error in failed.items():
        names = [node.name for node in attached.nodes if attached.engines[node.name] is engine]
        unreachable[names[0] if len(names) == 1 else engine.node] = error  # all nodes of a cluster share an engine
    return replace(
        attached,
        nodes=(*known, *(f.node for f in others)),
        engines={
            **{node.name: attached.engines[node.name] for node in known},
            **{f.node.name: f.engine for f in others},
        },
        hosts=found[0].labels.hosts if found else (),
        states={f.node.name: f.state for f in found},
        unreachable=unreachable,
        listed={engine: [f.state for f in removable if f.engine is engine] for engine in answered},
        owner=owner,
        started_by=started_by,
    )


def not_asked(found: Sequence[Found], asked: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts of the run's nodes that are not in `asked` and were not found under another name."""
    ranks, every = {f.labels.rank for f in found}, found[0].labels.hosts
    missing = (host for rank, host in enumerate(every) if rank not in ranks)
    return tuple(host for host in missing if host not in asked and host != labels.NO_HOST)


def engine_of(node: NodeOfRun) -> tuple[str, str]:
    """Return name and host of a node's engine; all nodes of a cluster share one."""
    return (node.name if cluster_name(node.host) is None else node.host), node.host


@dataclass(frozen=True)
class RunListing:
    """The runs on some nodes, newest last, with their containers by rank.

    failed: the errors of the nodes that could not be listed, by the name of the node in the fleet. locked: runs that
    have locks there, possibly without a container. no_engine: as Fleet's.
    """

    runs: Mapping[RunId, Sequence[Found]]
    failed: Mapping[str, LauncherError]
    locked: Collection[RunId]
    no_engine: LauncherError | None = None

    def unanswered(self, record: Record, hosts: Iterable[str]) -> dict[str, LauncherError]:
        """Return those of a run's hosts that could not list its containers, with their errors."""
        here = self.no_engine if record.traits.has_images else None
        known: dict[str, LauncherError | None] = {LOCAL: here, **self.failed}
        return {host: error for host in hosts if (error := known.get(host)) is not None}


def list_runs(fleet: Fleet, note: Note, *, claims: bool = False) -> RunListing:
    """Return the runs on these nodes. claims: also list locks."""
    listed, failed = _list(fleet, None, note, claims=claims)
    away = {**fleet.failed, **{engine.node: error for engine, error in failed.items()}}
    locked = {f.labels.run for f in listed if f.labels.purpose == "claim"}
    return RunListing(_by_run(listed), away, locked, fleet.no_engine)


def unsearched(fleet: Fleet, known: Callable[[], Sequence[Record]]) -> LauncherError | None:
    """Return why the container engine of `local` was not searched; None if it was, or if nobody expects one there.

    known: the runs that are recorded here.
    """
    error = fleet.no_engine
    if isinstance(error, EngineAbsent) and not any(
        record.traits.has_images and node.host == LOCAL for record in known() for node in record.nodes()
    ):
        return None
    return error


def warn_of_unsearched(fleet: Fleet, known: Callable[[], Sequence[Record]], note: Note) -> None:
    """Say that runs in containers of this machine were not found. known: as for `unsearched`."""
    if error := unsearched(fleet, known):
        note(f"warning: containers were not searched: {error}")


def _choose(text: str | None, listing: RunListing, fleet: Fleet, where: str) -> RunId:
    """Resolve `text` among the user's own runs first, then among those of the same account; else it may be a sweep's
    ID, for its latest variant. Raises RunUnknown, or NodesFailed if no run was found and nodes are unreachable.
    """
    runs = listing.runs
    if not runs and listing.failed:
        hosts = {engine.host for engine in fleet.engines} | {*fleet.failed}  # `local` can have two engines
        raise NodesFailed(list(listing.failed.values()), of=len(hosts))
    started = [run for run, found in runs.items() if any(_has_started(f.state) for f in found)]
    for most in (Owner.SELF, Owner.ACCOUNT):
        with suppress(RunUnknown):
            nearer = [run for run, found in runs.items() if min(f.owner for f in found) <= most]
            return store.resolve(text, nearer, where, [run for run in started if run in nearer])
    try:
        return store.resolve(text, list(runs), where, started)
    except RunUnknown:
        known = [(run, found[0].labels.group) for run, found in runs.items()]
        if text is None or (group := begun_by(text, known)) is None:
            raise
        return [run for run, member in known if member and member.group == group][-1]


def _has_started(state: ContainerState) -> bool:
    """A queued job of a cluster is also CREATED, but has a reason in `error`."""
    return state.phase is not Phase.CREATED or bool(state.error)


def _list(
    fleet: Fleet, run: RunId | None, note: Note, *, claims: bool
) -> tuple[list[Found], dict[Engine, LauncherError]]:
    """List the launcher's containers; those with invalid labels are ignored with a note. Return also the failures."""
    wanted = {labels.RUN: run} if claims else {labels.RUN: run, labels.PURPOSE: "run"}

    def ask(engine: Engine) -> tuple[Sequence[ContainerState], int]:
        return run_both(lambda: engine.list(wanted), engine.uid)

    answers = run_all_catching([partial(ask, engine) for engine in fleet.engines])
    found, failed, own = [], {}, caller()
    for engine, answer in zip(fleet.engines, answers, strict=True):
        if isinstance(answer, LauncherError):
            failed[engine] = answer
            continue
        states, uid = answer
        for state in states:
            try:
                read = labels.read(state.labels)
            except ValueError as error:
                note(f"{engine.node}: ignoring container {state.name} with invalid labels: {error}")
                continue
            account = Owner.SELF if read.owner == own else Owner.ACCOUNT
            found.append(Found(read, account if read.uid == uid else Owner.OTHER, engine, state))
    return found, failed


def _by_run(listed: Sequence[Found]) -> dict[RunId, list[Found]]:
    runs: dict[RunId, list[Found]] = {}
    for found in listed:
        if found.labels.purpose == "run":  # not a lock
            runs.setdefault(found.labels.run, []).append(found)
    for run, of_run in runs.items():  # prefer the user's own containers over another user's with the same run ID
        runs[run] = [f for f in of_run if f.owner is not Owner.OTHER] or of_run
    ordered = sorted(runs, key=lambda run: min(f.labels.created for f in runs[run]))
    return {run: sorted(runs[run], key=lambda f: f.labels.rank) for run in ordered}
