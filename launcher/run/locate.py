"""Finding a run: by its record here, or by the labels of its containers where no record is (`--nodes a,b`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import LauncherError, NodesFailed, RunUnknown
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
    states: Mapping[str, ContainerState]  # by the node's name; a node whose container was removed is missing
    unreachable: Mapping[str, LauncherError]
    fleet: Fleet

    def require_all(self) -> Attached:
        """Raises NodesFailed where a node did not answer."""
        if self.unreachable:
            raise NodesFailed(list(self.unreachable.values()))
        return self


@contextmanager
def attach(text: str | None, hosts: Sequence[str] | None, ssh_config: Path | None) -> Iterator[Attached]:
    """Find the run that `text` means and connect to its nodes.

    hosts: ask these nodes, no local record is needed; None: the record tells where the nodes are. Raises RunUnknown.
    """
    if hosts is None:
        record = store.find(text)
        nodes = record.nodes()
        named = [(node.name, node.host) for node in nodes]
        with connect(named, record.runtime, ssh_config, allow_failures=True) as fleet:
            found = on_nodes(fleet).get(record.run, [])
            yield Attached(
                record=record,
                nodes=tuple(n for n in nodes if n.name not in fleet.failed),
                engines={engine.node: engine for engine in fleet.engines},
                states={f.node.name: f.state for f in found},
                unreachable=fleet.failed,
                fleet=fleet,
            )
        return
    with connect([(host, host) for host in hosts], ssh_config=ssh_config, allow_failures=True) as fleet:
        known = on_nodes(fleet)
        if not known and fleet.failed:
            raise NodesFailed(list(fleet.failed.values()), of=len(hosts))
        run = store.resolve(text, list(known), where="on " + ", ".join(hosts))
        first = known[run][0].state.labels
        nodes = tuple(f.node for f in known[run])
        yield Attached(
            record=Record.rebuild(run, first[labels.JOB], first[labels.RUNTIME], nodes),
            nodes=nodes,
            engines={f.node.name: f.engine for f in known[run]},
            states={f.node.name: f.state for f in known[run]},
            unreachable=fleet.failed,
            fleet=fleet,
        )


def on_nodes(fleet: Fleet) -> dict[RunId, list[Found]]:
    """Every run that these nodes know of, the latest last; the containers of each by rank."""
    listed = fleet.each(lambda engine: engine.list({labels.RUN: None, labels.PURPOSE: "run"}))
    runs: dict[RunId, list[Found]] = {}
    for engine, states in zip(fleet.engines, listed, strict=True):
        for state in states:
            runs.setdefault(state.labels[labels.RUN], []).append(Found(node_of(state), engine, state))
    ordered = sorted(runs, key=lambda run: min(f.state.labels.get(labels.CREATED, "") for f in runs[run]))
    return {run: sorted(runs[run], key=lambda f: f.node.rank) for run in ordered}


def node_of(state: ContainerState) -> NodeOfRun:
    """Where a container belongs, as its labels tell. Raises RunUnknown where they are not as we write them."""
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
