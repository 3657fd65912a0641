"""Finding a run: by its record here, or by the labels of its containers where no record is (`--nodes a,b`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from launcher.errors import LauncherError, NodesFailed, RunUnknown, UsageError
from launcher.model import labels
from launcher.model.container import ContainerState
from launcher.model.plan import RunId
from launcher.node.connect import Fleet, connect
from launcher.node.engine import Engine
from launcher.records import store
from launcher.records.store import NodeOfRun, Record


@dataclass(frozen=True)
class Found:
    """A container of ours on a node."""

    node: NodeOfRun
    engine: Engine
    state: ContainerState


@dataclass(frozen=True)
class Attached:
    """A run with the engines of its nodes at hand; a node that does not answer is in `unreachable` instead."""

    record: Record
    nodes: tuple[NodeOfRun, ...]  # by rank, those that answer
    engines: Mapping[str, Engine]  # by the node's name in the run
    fleet: Fleet
    states: Mapping[str, ContainerState] = field(default_factory=dict)  # by the node's name; without removed containers
    unreachable: Mapping[str, LauncherError] = field(default_factory=dict)
    listed: Mapping[Engine, Sequence[ContainerState]] = field(default_factory=dict)  # of the run

    def require_all(self) -> None:
        """Raises NodesFailed where a node did not answer."""
        if self.unreachable:
            raise NodesFailed(list(self.unreachable.values()))

    def node(self, wanted: str) -> NodeOfRun:
        """By its name or host. Raises UsageError where the run has no such node, its error where it does not answer."""
        if wanted in self.unreachable:
            raise self.unreachable[wanted]
        for node in self.nodes:
            if wanted in (node.name, node.host):
                return node
        raise UsageError("--node", f"{wanted}: the run's nodes are {', '.join(node.name for node in self.nodes)}")

    def require_any(self) -> None:
        """Raises NodesFailed where no node answered."""
        if not self.nodes:
            raise NodesFailed(list(self.unreachable.values()))


@contextmanager
def attach(
    text: str | None, hosts: Sequence[str] | None, ssh_config: Path | None, *, claims: bool = False
) -> Iterator[Attached]:
    """Find the run that `text` means and connect to its nodes.

    hosts: ask these nodes, no local record is needed; None: the record has the nodes. claims: list the
    run's GPU claims too. Raises RunUnknown.
    """
    record = store.find(text) if hosts is None else None
    named = [(node.name, node.host) for node in record.nodes()] if record else [(host, host) for host in hosts or ()]
    runtime = record.runtime if record else None
    with connect(named, runtime, ssh_config, allow_failures=True) as fleet:
        listed = _list(fleet, record.run if record else None, claims=claims)
        runs = _by_run(listed)
        if record is None:
            if not runs and fleet.failed:
                raise NodesFailed(list(fleet.failed.values()), of=len(named))
            run = store.resolve(text, list(runs), where="on " + ", ".join(hosts or ()))
            found = runs[run]
            first = found[0].state.labels
            nodes = tuple(f.node for f in found)
            engines = {f.node.name: f.engine for f in found}
            record = Record.rebuild(run, first[labels.JOB], first[labels.RUNTIME], nodes)
        else:
            found = runs.get(record.run, [])
            nodes = tuple(node for node in record.nodes() if node.name not in fleet.failed)
            engines = {engine.node: engine for engine in fleet.engines}
        yield Attached(
            record=record,
            nodes=nodes,
            engines=engines,
            fleet=fleet,
            states={f.node.name: f.state for f in found},
            unreachable=fleet.failed,
            listed={engine: [s for s in listed[engine] if s.labels[labels.RUN] == record.run] for engine in listed},
        )


def on_nodes(fleet: Fleet) -> dict[RunId, list[Found]]:
    """Every run that these nodes know of, the latest last; the containers of each by rank."""
    return _by_run(_list(fleet, None, claims=False))


def _list(fleet: Fleet, run: RunId | None, *, claims: bool) -> dict[Engine, Sequence[ContainerState]]:
    wanted = {labels.RUN: run} if claims else {labels.RUN: run, labels.PURPOSE: "run"}
    return dict(zip(fleet.engines, fleet.each(lambda engine: engine.list(wanted)), strict=True))


def _by_run(listed: Mapping[Engine, Sequence[ContainerState]]) -> dict[RunId, list[Found]]:
    runs: dict[RunId, list[Found]] = {}
    for engine, states in listed.items():
        for state in states:
            if state.labels.get(labels.PURPOSE) == "run":  # no claim
                runs.setdefault(state.labels[labels.RUN], []).append(Found(node_of(state), engine, state))
    ordered = sorted(runs, key=lambda run: min(f.state.labels.get(labels.CREATED, "") for f in runs[run]))
    return {run: sorted(runs[run], key=lambda f: f.node.rank) for run in ordered}


def node_of(state: ContainerState) -> NodeOfRun:
    """Where a container belongs, by its labels. Raises RunUnknown where they are not as we write them."""
    try:
        first, count = state.labels[labels.RANKS].split("+")
        return NodeOfRun(
            name=state.labels[labels.NODE],
            host=state.labels[labels.HOST],
            rank=int(state.labels[labels.NODE_RANK]),
            container=state.name,
            output=state.labels[labels.OUTPUT],
            ranks=range(int(first), int(first) + int(count)),
        )
    except (KeyError, ValueError) as error:
        raise RunUnknown(
            f"container {state.name}",
            f"carries labels that are not ours ({error})",
            f"remove it by hand: docker rm -f {state.name}",
        ) from error
