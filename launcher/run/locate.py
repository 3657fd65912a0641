"""Finding a run, by its record here or by the labels of its containers (`--nodes a,b`); and whose it is."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path

from launcher.errors import LauncherError, NodesFailed, RunUnknown, UsageError
from launcher.model import labels
from launcher.model.container import ContainerState
from launcher.model.host import cluster_name
from launcher.model.labels import RunLabels
from launcher.model.plan import RunId
from launcher.node.connect import Fleet, connect
from launcher.node.engine import Engine
from launcher.node.parallel import run_both
from launcher.records import store
from launcher.records.store import NodeOfRun, Record

Note = Callable[[str], None]  # shows a person what was found and left aside


class Owner(IntEnum):
    """Whose a run is, by the ssh user's uid on the node, and by the caller where no run is named. Nearest first."""

    SELF = 0  # this user of the node, and this caller
    ACCOUNT = 1  # this user of the node, another caller
    OTHER = 2  # another user of the node


def caller() -> str:
    """user@host, as it fits into a label."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in a container
        user = str(os.getuid())
    return re.sub(r"[^!-~]", "_", f"{user}@{socket.gethostname()}")[:400]


@dataclass(frozen=True)
class Found:
    """A container on a node whose labels are as we write them."""

    labels: RunLabels
    owner: Owner
    engine: Engine
    state: ContainerState

    @property
    def node(self) -> NodeOfRun:
        told = self.labels
        return NodeOfRun(told.node, self.engine.host, told.rank, self.state.name, told.output, told.ranks)


@dataclass(frozen=True)
class Attached:
    """A run with the engines of its nodes at hand; a node that does not answer is in `unreachable` instead."""

    record: Record
    nodes: tuple[NodeOfRun, ...]  # by rank, those that answer
    engines: Mapping[str, Engine]  # by the node's name in the run
    fleet: Fleet
    states: Mapping[str, ContainerState] = field(default_factory=dict)  # by the node's name; without removed containers
    unreachable: Mapping[str, LauncherError] = field(default_factory=dict)
    listed: Mapping[Engine, Sequence[ContainerState]] = field(default_factory=dict)  # of the run, and ours to remove
    owner: Owner = Owner.SELF
    started_by: str = ""  # user@host of the caller, and the uid on the node; "" where no container tells
    hosts: tuple[str, ...] = ()  # of all of its nodes, as its caller addressed them; () where no container tells
    not_asked: tuple[str, ...] = ()  # those of them that the user did not name

    @property
    def may_lose(self) -> int:
        """How many of its nodes the run can do without."""
        least = self.record.min_nodes
        return len(self.nodes) + len(self.unreachable) - least if least else 0

    def is_done(self, states: Mapping[str, ContainerState]) -> bool:
        """Whether a run that may lose nodes has come to its end on one: it has told the others so, if it could."""
        return self.may_lose > 0 and any(state.exit_code == 0 for state in states.values())

    def require_all(self) -> None:
        """Raises NodesFailed where a node did not answer."""
        if self.unreachable:
            raise NodesFailed(list(self.unreachable.values()))

    def require_any(self) -> None:
        """Raises NodesFailed where no node answered."""
        if not self.nodes:
            self.require_all()

    def node(self, wanted: str) -> NodeOfRun:
        """By its name or host. Raises UsageError where the run has no such node, its error where it does not answer."""
        if wanted in self.unreachable:
            raise self.unreachable[wanted]
        for node in self.nodes:
            if wanted in (node.name, node.host):
                return node
        raise UsageError("--node", f"{wanted}: the run's nodes are {', '.join(node.name for node in self.nodes)}")


def attach(record: Record, fleet: Fleet) -> Attached:
    """The run on record, over connections to its nodes; what its containers do now is not known yet: see `look`."""
    by_name = {engine.node: engine for engine in fleet.engines}
    nodes = tuple(node for node in record.nodes() if engine_of(node)[0] not in fleet.failed)
    engines = {node.name: by_name[engine_of(node)[0]] for node in nodes}
    return Attached(record, nodes, engines, fleet, unreachable=fleet.failed)


def connect_to(record: Record, ssh_config: Path | None) -> Attached:
    """Connect to the nodes of a run on record; those that do not answer are in `unreachable`."""
    hosts = [engine_of(node) for node in record.nodes()] + [(host, host) for host in record.other_hosts()]
    return attach(record, connect(list(dict.fromkeys(hosts)), record.runtime, ssh_config, allow_failures=True))


def search(text: str | None, hosts: Sequence[str], ssh_config: Path | None, note: Note, runs: Path) -> Attached:
    """The run that `text` means, by the labels of its containers on these nodes; its record here is rebuilt.

    Raises RunUnknown, NodesFailed.
    """
    fleet = connect([(host, host) for host in dict.fromkeys(hosts)], None, ssh_config, allow_failures=True)
    try:
        on_these = _by_run(_list(fleet, None, note, claims=False))
        found = on_these[_choose(text, on_these, fleet, where="on " + ", ".join(hosts))]
        told, nodes = found[0].labels, tuple(f.node for f in found)
        record = Record.rebuild(
            told.run, told.runtime, nodes, runs, min_nodes=told.min_nodes, spares=told.spares, hosts=told.hosts
        )
        engines = {f.node.name: f.engine for f in found}
        missing = _not_asked(found, hosts)
        return Attached(record, nodes, engines, fleet, unreachable=fleet.failed, not_asked=missing)
    except BaseException:
        fleet.close()
        raise


def look(attached: Attached, note: Note, *, claims: bool = False, any_owner: bool = False) -> Attached:
    """The same with the run's containers as its nodes list them now, in one round trip.

    claims: list the run's GPU claims too. any_owner: containers of other users count as ours to remove.
    """
    run = attached.record.run
    listed = _list(attached.fleet, run, note, claims=claims)
    found = _by_run(listed).get(run, [])
    owner = min((f.owner for f in found), default=Owner.SELF)
    started_by = found[0].labels.started_by if found else ""
    if owner is Owner.OTHER:
        note(f"{run} is of {started_by}, another user: its files may not be readable")
    others = [f for f in found if f.node.name not in attached.engines]  # of a record that had not all nodes
    ours = [f for f in listed if f.labels.run == run and (any_owner or f.owner is not Owner.OTHER)]
    return replace(
        attached,
        nodes=(*attached.nodes, *(f.node for f in others)),
        engines={**attached.engines, **{f.node.name: f.engine for f in others}},
        hosts=found[0].labels.hosts if found else (),
        states={f.node.name: f.state for f in found},
        listed={engine: [f.state for f in ours if f.engine is engine] for engine in attached.fleet.engines},
        owner=owner,
        started_by=started_by,
    )


def _not_asked(found: Sequence[Found], asked: Sequence[str]) -> tuple[str, ...]:
    """Hosts of the run's nodes that are not among `asked` and have not been found by another name."""
    ranks, every = {f.labels.rank for f in found}, found[0].labels.hosts
    missing = (host for rank, host in enumerate(every) if rank not in ranks)
    return tuple(host for host in missing if host not in asked and host != labels.NO_HOST)


def engine_of(node: NodeOfRun) -> tuple[str, str]:
    """Name and host of its engine; all nodes on a cluster have one."""
    return (node.name if cluster_name(node.host) is None else node.host), node.host


def on_nodes(fleet: Fleet, note: Note) -> dict[RunId, list[Found]]:
    """Every run that these nodes know of, the latest last; the containers of each by rank."""
    return _by_run(_list(fleet, None, note, claims=False))


def _choose(text: str | None, runs: Mapping[RunId, Sequence[Found]], fleet: Fleet, where: str) -> RunId:
    """One's own runs are meant first, then those of the same account. Raises RunUnknown; NodesFailed if no run was
    found and nodes do not answer.
    """
    if not runs and fleet.failed:
        answering = {engine.host for engine in fleet.engines}  # `local` may answer with two engines
        raise NodesFailed(list(fleet.failed.values()), of=len(answering) + len(fleet.failed))
    for most in (Owner.SELF, Owner.ACCOUNT):
        with suppress(RunUnknown):
            nearer = [run for run, found in runs.items() if min(f.owner for f in found) <= most]
            return store.resolve(text, nearer, where)
    return store.resolve(text, list(runs), where)


def _list(fleet: Fleet, run: RunId | None, note: Note, *, claims: bool) -> list[Found]:
    """Containers with other labels than ours are left aside with a note."""
    wanted = {labels.RUN: run} if claims else {labels.RUN: run, labels.PURPOSE: "run"}
    answers = fleet.each(lambda engine: run_both(lambda: engine.list(wanted), engine.uid))
    found, own = [], caller()
    for engine, (states, uid) in zip(fleet.engines, answers, strict=True):
        for state in states:
            try:
                told = labels.read(state.labels)
            except ValueError as error:
                note(f"{engine.node}: container {state.name} is ignored, its labels are not the launcher's: {error}")
                continue
            account = Owner.SELF if told.owner == own else Owner.ACCOUNT
            found.append(Found(told, account if told.uid == uid else Owner.OTHER, engine, state))
    return found


def _by_run(listed: Sequence[Found]) -> dict[RunId, list[Found]]:
    runs: dict[RunId, list[Found]] = {}
    for found in listed:
        if found.labels.purpose == "run":  # no claim
            runs.setdefault(found.labels.run, []).append(found)
    for run, of_run in runs.items():  # where another user's container has our run's id, ours is meant
        runs[run] = [f for f in of_run if f.owner is not Owner.OTHER] or of_run
    ordered = sorted(runs, key=lambda run: min(f.labels.created for f in runs[run]))
    return {run: sorted(runs[run], key=lambda f: f.labels.rank) for run in ordered}
