"""Copies data along a chain of processes, in rounds, until each node has a whole copy or is excluded.

The source sends each byte to one node, which forwards it to the next as it arrives. When a process or a connection
fails, the round ends; the next one sends only missing data, and excludes nodes that keep failing.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

from launcher.errors import DataFailed, LauncherError, NodeUnreachable
from launcher.features.data import worker
from launcher.features.data.certificates import certificates
from launcher.features.data.locations import DataSource
from launcher.features.data.worker import Worker, failure
from launcher.model.container import Mount
from launcher.model.facts import NodeFacts
from launcher.model.home import cache_folder
from launcher.model.progress import Log, OnProgress
from launcher.node.engine import Engine
from launcher.node.forwarding import forwarded
from launcher.node.machine import CommandStream, Machine
from launcher.node.parallel import run_all_catching
from launcher.planning.rendezvous import candidates

ROOT = "/launcher-data"  # this user's folder of copies, in the containers
SOURCE = "/launcher-source"
TRIES = 3  # of a node, in a row, in which it receives nothing
SILENCE = 30.0  # seconds without a report: processes report every half second, so the process or its node hangs
ALTERED = "remove it: launcher data rm; one of the nodes before it in the job's order altered the data: check them"
GRACE = 5.0  # seconds for the other processes to report their progress after one has failed


@dataclass(frozen=True)
class Endpoint:
    """A node of a transfer. root: the folder of its copies. address: as the job specifies it, if it does."""

    engine: Engine
    facts: NodeFacts
    root: str
    image: str
    address: str | None = None
    inside: str = ROOT  # the folder, as a path in its container

    @property
    def node(self) -> str:
        return self.engine.node

    def open(self, *more: Mount) -> CommandStream:
        """Start a process. more: what it sees besides the folder. Raises NodeUnreachable, NodeUnfit."""
        return self.engine.tool(worker.tool(self.image, self.facts, [Mount(self.root, self.inside), *more]))


@dataclass(frozen=True)
class Sender:
    """The connected source. single: name of the file if the data is a single file. rehash: read all of it again."""

    source: DataSource
    machine: Machine
    path: str
    single: str
    endpoint: Endpoint | None  # None: this machine, without a container
    rehash: bool = False

    def open(self) -> CommandStream:
        if self.endpoint is None:
            return self.machine.open(worker.local_argv())
        return self.endpoint.open(Mount(self.path, self._inside, read_only=True))

    @property
    def _inside(self) -> str:
        return f"{SOURCE}/{self.single}" if self.single else SOURCE

    def order(self) -> dict[str, Any]:
        root = ROOT if self.endpoint else str(cache_folder(os.environ) / "data")
        path = self._inside if self.endpoint else self.path
        order = {"role": "source", "path": path, "root": root, "label": self.source.label, "rehash": self.rehash}
        return {**order, "content": self.source.content}


@dataclass(frozen=True)
class Delivered:
    """content: name of the copies. sent: bytes sent by the source; received: bytes by node."""

    content: str = ""
    sent: int = 0
    received: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, LauncherError] = field(default_factory=dict)


End = Mapping[str, Any] | LauncherError  # the final message of a process, or the error if it has none


@dataclass(frozen=True)
class RoundEnd:
    """How one chain ended. ends: by node, in the order of the chain. received: bytes by node, in this round."""

    source: End
    ends: Mapping[str, End]
    sent: int = 0
    received: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Undelivered:
    """What is left to do.

    chain: nodes of the next round, in order; empty at the end. alone: nodes that the other nodes cannot reach: each
    gets a round of its own after the others. tries: of a node, in a row, in which it received nothing. stuck: rounds in
    a row that nobody is to blame for and in which nothing was received. failed: excluded nodes. broken: why all is
    given up.
    """

    chain: tuple[str, ...]
    alone: tuple[str, ...] = ()
    tries: Mapping[str, int] = field(default_factory=dict)
    stuck: int = 0
    content: str = ""
    failed: Mapping[str, LauncherError] = field(default_factory=dict)
    broken: LauncherError | None = None


def push(origin: Sender, targets: Sequence[Endpoint], log: Log, on_progress: OnProgress) -> Delivered:
    """Copy until every target has the data or is in `failed`. Raises DataFailed for the source, NodeUnreachable."""
    by_node = {target.node: target for target in targets}
    left, sent, received = Undelivered(tuple(by_node)), 0, dict.fromkeys(by_node, 0)
    while left.chain:
        done = _round(origin, [by_node[node] for node in left.chain], on_progress)
        sent += done.sent
        received |= {node: received[node] + size for node, size in done.received.items()}
        left, notes = next_round(left, done, origin.machine.node, from_here=origin.endpoint is None)
        for note in notes:
            log(note)
        if left.broken:
            raise left.broken
    return Delivered(left.content, sent, received, left.failed)


def next_round(left: Undelivered, done: RoundEnd, source: str, *, from_here: bool) -> tuple[Undelivered, list[str]]:
    """Return what is left after a round, and notes for the user. source: its name. from_here: it is this machine."""
    if isinstance(done.source, Mapping) and done.source.get("end") in ("changed", "refused", "failed"):
        return replace(left, broken=failure(source, done.source)), []
    failures = _failures(done)
    chain, alone, tries, failed = list[str](), list(left.alone), dict(left.tries), dict(left.failed)
    content, notes = left.content, list[str]()
    for node in left.chain:
        end, received = done.ends[node], done.received.get(node, 0)
        if _is_whole(end) and _is_whole(done.source):
            content = done.source["content"]
            if end["content"] != content:  # a node before it altered both data and hashes
                failed[node] = DataFailed(node, "its copy differs from the source", ALTERED)
        elif node not in failures:
            chain.append(node)
        elif from_here and len(left.chain) > 1 and not received and _is_connection_failure(end):
            alone.append(node)
            notes.append(f"{node} is not reachable from the other nodes: sending from this machine")
        else:
            error = failures[node]
            tries[node] = 1 if received else tries.get(node, 0) + 1
            if tries[node] >= TRIES or isinstance(error, NodeUnreachable) or _is_final(end):
                failed[node] = error
                notes.append(f"excluding {node}: {error.what}")
            else:
                chain.append(node)
                notes.append(f"{node}: {error.what}; retrying")
    stuck = 0 if any(done.received.values()) or failures or _is_whole(done.source) else left.stuck + 1
    broken: LauncherError | None = None
    if isinstance(done.source, NodeUnreachable):
        broken = done.source
    elif stuck >= TRIES:
        broken = done.source if isinstance(done.source, LauncherError) else failure(source, done.source)
    if not chain and alone:
        chain.append(alone.pop(0))
    return Undelivered(tuple(chain), tuple(alone), tries, stuck, content, failed, broken), notes


def _is_final(end: End) -> bool:
    return isinstance(end, Mapping) and end.get("end") in ("room", "refused", "failed")


def _is_whole(end: End) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(end, Mapping) and end.get("end") == "whole" and bool(end.get("content"))


def _is_connection_failure(end: End) -> bool:
    """Whether its process worked, but a connection failed."""
    return isinstance(end, Mapping) and end.get("end") in ("lost", "stopped")


def _failures(done: RoundEnd) -> dict[str, LauncherError]:
    """Return the nodes that a round failed at: those that failed themselves; if none did, and the source did not, the
    one that the process before it lost; else all.
    """
    own = {node: error for node, end in done.ends.items() if (error := _own_failure(node, end)) is not None}
    if own or isinstance(done.source, LauncherError):
        return own
    before: End = done.source
    for node, end in done.ends.items():
        if _lost_next(before):
            return {node: failure(node, before)}
        before = end
    cut = {"end": "lost", "why": "a connection between nodes was lost"}
    return {node: failure(node, cut) for node in done.ends}


def _own_failure(node: str, end: End) -> LauncherError | None:
    if isinstance(end, LauncherError):
        return end
    if _is_final(end) or end.get("end") == "again":
        return failure(node, {"why": "some of its pieces differ from the source", **end})
    return None


def _lost_next(end: End) -> TypeGuard[Mapping[str, Any]]:
    """Whether a process lost the connection to the next one."""
    return isinstance(end, Mapping) and end.get("end") == "lost" and end.get("where") == "downstream"


def _round(origin: Sender, targets: Sequence[Endpoint], on_progress: OnProgress) -> RoundEnd:
    """Run one chain."""
    nodes = [target.node for target in targets]
    names = [f"{secrets.token_hex(4)}-{rank}" for rank in range(1 + len(targets))]  # the source's, then the targets'
    opened = [(origin.machine.node, origin.open), *((target.node, target.open) for target in targets)]
    orders = _orders(origin, targets, names)
    ends: list[End]
    with ExitStack() as held:
        started = run_all_catching([partial(_start, *each, order) for each, order in zip(opened, orders, strict=True)])
        running = [each for each in started if not isinstance(each, LauncherError)]
        for each, _ in running:
            held.enter_context(closing(each))
        if len(running) < len(started):
            ends = [each if isinstance(each, LauncherError) else {"end": "stopped"} for each in started]
            return RoundEnd(ends[0], dict(zip(nodes, ends[1:], strict=True)))
        workers, ports = [each for each, _ in running], [port for _, port in running[1:]]
        addresses = [_addresses(target, port, targets) for target, port in zip(targets, ports, strict=True)]
        if origin.endpoint is None:  # this machine may reach the nodes only by ssh
            through = held.enter_context(forwarded(targets[0].engine.machine, ports[0]))
            addresses[0].append(("127.0.0.1", through))
        following = [{"addresses": own, "name": name} for own, name in zip(addresses, names[1:], strict=True)]
        for each, after in zip(workers, [*following, None], strict=True):
            each.send(after)
        over = threading.Event()
        ends = [*run_all_catching([partial(_attend, each, over, on_progress) for each in workers])]
        received = {node: each.counted["received"] for node, each in zip(nodes, workers[1:], strict=True)}
        return RoundEnd(ends[0], dict(zip(nodes, ends[1:], strict=True)), workers[0].counted["sent"], received)


def _orders(origin: Sender, targets: Sequence[Endpoint], names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return what each process of a chain is told at its start. names: of the processes, for their certificates."""
    keys = certificates(names)
    label, about = origin.source.label, {"source": origin.source.label, "name": origin.source.name}
    orders: list[Mapping[str, Any]] = [{**origin.order(), "tls": keys[names[0]]}]
    for target, before, own in zip(targets, names, names[1:], strict=False):
        order = {"role": "sink", "root": target.inside, "label": label, "about": {**about, "image": target.image}}
        orders.append({**order, "upstream": before, "tls": keys[own], "state": origin.source.state})
    return orders


def _addresses(target: Endpoint, port: int, targets: Sequence[Endpoint]) -> list[tuple[str, int]]:
    """Return where the process of a target may be reached."""
    others = [each.facts for each in targets if each.facts is not target.facts]
    return [(ip, port) for ip in candidates([target.facts, *others], target.address)]


def _start(node: str, begin: Callable[[], CommandStream], order: Mapping[str, Any]) -> tuple[Worker, int]:
    """Start a process; return its port, 0 for the source. Raises DataFailed, NodeUnreachable, NodeUnfit."""
    made = Worker(node, begin(), order)
    try:
        if order["role"] == "source":
            made.until("bytes", timeout=worker.LIST_TIMEOUT)
            return made, 0
        return made, made.until("port")
    except BaseException:
        made.close()
        raise


def _attend(each: Worker, over: threading.Event, on_progress: OnProgress) -> Mapping[str, Any]:
    """Return its final message. After another one failed, wait up to GRACE seconds for it. Raises DataFailed, ..."""
    ended_at, total = 0.0, 0
    try:
        while True:
            message = each.report(0.5)
            if message and message.get("end"):
                if message["end"] != "whole":
                    over.set()
                elif total:
                    on_progress(each.node, total, total)
                return message
            if message and message.get("total"):
                total = message["total"]
                on_progress(each.node, min(message.get("done", 0), total - 1), total)  # equal only once it is whole
            if time.monotonic() - each.heard > SILENCE:
                raise DataFailed(each.node, f"did not respond for {SILENCE:.0f} s", "check the load of the node")
            if over.is_set():
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > GRACE:
                    return {"end": "stopped"}
    except LauncherError:
        over.set()
        raise


def verify(endpoint: Endpoint, content: str) -> list[str]:
    """Read a whole copy; return the files that differ. Raises DataFailed, NodeUnreachable."""
    order = {"role": "verify", "root": endpoint.inside, "content": content}
    with closing(Worker(endpoint.node, endpoint.open(), order)) as process:
        while True:
            message = process.report(1.0)
            if message and "damaged" in message:
                return [*message["damaged"]]
            if message and "end" in message:
                raise failure(endpoint.node, message)
            if time.monotonic() - process.heard > SILENCE:
                raise DataFailed(endpoint.node, f"did not respond for {SILENCE:.0f} s", "check the load of the node")
