"""Finding a run, by its record here or by the labels of its containers (`--nodes a,b`); and whose it is."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from launcher.errors import LauncherError, NodesFailed, RunUnknown, UsageError
from launcher.model import labels
from launcher.model.container import ContainerState
from launcher.model.labels import RunLabels
from launcher.model.plan import RunId
from launcher.node.connect import CLUSTER, Fleet, connect
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


@contextmanager
def attach(
    text: str | None,
    hosts: Sequence[str] | None,
    ssh_config: Path | None,
    note: Note,
    *,
    claims: bool = False,
    any_owner: bool = False,
) -> Iterator[Attached]:
    """Find the run that `text` means and connect to its nodes.

    hosts: ask these nodes, no local record is needed; None: the record has the nodes. claims: list the run's GPU claims
    too. any_owner: containers of other users count as ours to remove. Raises RunUnknown.
    """
    record = store.find(text) if hosts is None else None
    named = [engine_of(node) for node in record.nodes()] if record else [(host, host) for host in hosts or ()]
    runtime = record.runtime if record else None
    with connect(list(dict.fromkeys(named)), runtime, ssh_config, allow_failures=True) as fleet:
        listed = _list(fleet, record.run if record else None, note, claims=claims)
        runs = _by_run(listed)
        if record is None:
            if not runs and fleet.failed:
                raise NodesFailed(list(fleet.failed.values()), of=len(named))
            found = runs[_choose(text, runs, where="on " + ", ".join(hosts or ()))]
            nodes = tuple(f.node for f in found)
            engines = {f.node.name: f.engine for f in found}
            told = found[0].labels
            record = Record.rebuild(told.run, told.runtime, nodes, min_nodes=told.min_nodes, spares=told.spares)
        else:
            found = runs.get(record.run, [])
            by_name = {engine.node: engine for engine in fleet.engines}
            nodes = tuple(node for node in record.nodes() if engine_of(node)[0] not in fleet.failed)
            engines = {node.name: by_name[engine_of(node)[0]] for node in nodes}
        whose = min((f.owner for f in found), default=Owner.SELF)
        started_by = found[0].labels.started_by if found else ""
        if whose is Owner.OTHER:
            note(f"{record.run} is of {started_by}, another user: its files may not be readable")
        ours = [f for f in listed if f.labels.run == record.run and (any_owner or f.owner is not Owner.OTHER)]
        yield Attached(
            record=record,
            nodes=nodes,
            engines=engines,
            fleet=fleet,
            states={f.node.name: f.state for f in found},
            unreachable=fleet.failed,
            listed={engine: [f.state for f in ours if f.engine is engine] for engine in fleet.engines},
            owner=whose,
            started_by=started_by,
        )


def engine_of(node: NodeOfRun) -> tuple[str, str]:
    """Name and host of its engine; all nodes on a cluster have one."""
    return (node.host if node.host.startswith(CLUSTER) else node.name), node.host


def on_nodes(fleet: Fleet, note: Note) -> dict[RunId, list[Found]]:
    """Every run that these nodes know of, the latest last; the containers of each by rank."""
    return _by_run(_list(fleet, None, note, claims=False))


def _choose(text: str | None, runs: Mapping[RunId, Sequence[Found]], where: str) -> RunId:
    """One's own runs are meant first, then those of the same account. Raises RunUnknown."""
    for most in (Owner.SELF, Owner.ACCOUNT):
        with suppress(RunUnknown):
            nearer = [run for run, found in runs.items() if min(f.owner for f in found) <= most]
            return store.resolve(text, nearer, where)
    return store.resolve(text, list(runs), where)


def _list(fleet: Fleet, run: RunId | None, note: Note, *, claims: bool) -> list[Found]:
    """Containers with other labels than ours are left aside with a note."""
    wanted = {labels.RUN: run} if claims else {labels.RUN: run, labels.PURPOSE: "run"}
    answers = fleet.each(lambda engine: run_both(lambda: engine.list(wanted), engine.uid))
    found = []
    for engine, (states, uid) in zip(fleet.engines, answers, strict=True):
        for state in states:
            try:
                told = labels.read(state.labels)
            except ValueError as error:
                note(f"{engine.node}: container {state.name} is ignored, its labels are not the launcher's: {error}")
                continue
            account = Owner.SELF if told.owner == caller() else Owner.ACCOUNT
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
