"""Copies data along a chain of processes, in rounds, until each node has a whole copy or is excluded.

The source sends each byte to one node, which forwards it to the next as it arrives. When a process or a connection
fails, the round ends; the next one sends only missing data, and excludes nodes that keep failing.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
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
from launcher.node.forwarding import forwarded
from launcher.node.machine import Machine
from launcher.node.parallel import run_all_settled
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

    machine: Machine
    facts: NodeFacts
    root: str
    image: str
    address: str | None = None
    inside: str = ROOT  # the folder, as a path in its container

    @property
    def node(self) -> str:
        return self.machine.node

    def argv(self, *more: Mount) -> list[str]:
        return worker.container_argv(self.image, self.facts, [Mount(self.root, self.inside), *more])


@dataclass(frozen=True)
class Sender:
    """The connected source. single: name of the file if the data is a single file. rehash: read all of it again."""

    source: DataSource
    machine: Machine
    path: str
    single: str
    endpoint: Endpoint | None  # None: this machine, without a container
    rehash: bool = False

    def argv(self) -> list[str]:
        if self.endpoint is None:
            return worker.local_argv()
        return self.endpoint.argv(Mount(self.path, self._inside, read_only=True))

    @property
    def _inside(self) -> str:
        return f"{SOURCE}/{self.single}" if self.single else SOURCE

    def order(self) -> dict[str, Any]:
        root = ROOT if self.endpoint else str(cache_folder(os.environ) / "data")
        path = self._inside if self.endpoint else self.path
        return {"role": "source", "path": path, "root": root, "label": self.source.label, "rehash": self.rehash}


@dataclass
class Delivered:
    """content: name of the copies. sent: bytes sent by the source; received: bytes by node."""

    content: str = ""
    sent: int = 0
    received: dict[str, int] = field(default_factory=dict)
    failed: dict[str, LauncherError] = field(default_factory=dict)


def push(origin: Sender, targets: Sequence[Endpoint], log: Log, on_progress: OnProgress) -> Delivered:
    """Copy until every target has the data or is in `failed`. Raises DataFailed for the source, NodeUnreachable."""
    result, tries = Delivered(received={t.node: 0 for t in targets}), dict.fromkeys((t.node for t in targets), 0)
    waiting, alone, stuck = list(targets), list[Endpoint](), 0
    while waiting or alone:
        if not waiting:  # nodes that the other nodes cannot reach
            waiting.append(alone.pop(0))
        before = {target.node: result.received[target.node] for target in waiting}
        ends = _round(origin, waiting, result, on_progress)
        source = ends.pop(origin.machine)
        _refuse_source(origin, source)
        failures = _failures(waiting, source, ends)
        for target in list(waiting):
            end = ends[target.machine]
            if _is_whole(end) and _is_whole(source):
                waiting.remove(target)
                result.content = source["content"]
                if end["content"] != source["content"]:  # a node before it altered both data and hashes
                    result.failed[target.node] = DataFailed(target.node, "its copy differs from the source", ALTERED)
            elif error := failures.get(target.node):
                nothing = result.received[target.node] == before[target.node]
                if origin.endpoint is None and len(before) > 1 and nothing and _is_connection_failure(end):
                    log(f"{target.node} is not reachable from the other nodes: sending from this machine")
                    waiting.remove(target)
                    alone.append(target)
                    continue
                tries[target.node] = tries[target.node] + 1 if nothing else 1
                if tries[target.node] >= TRIES or isinstance(error, NodeUnreachable) or _is_final(end):
                    result.failed[target.node] = error
                    waiting.remove(target)
                    log(f"excluding {target.node}: {error.what}")
                else:
                    log(f"{target.node}: {error.what}; retrying")
        progress = any(result.received[node] > size for node, size in before.items())
        stuck = 0 if progress or failures or _is_whole(source) else stuck + 1
        if stuck >= TRIES or isinstance(source, NodeUnreachable):
            raise source if isinstance(source, LauncherError) else failure(origin.machine.node, source)
    return result


def _refuse_source(origin: Sender, end: Mapping[str, Any] | LauncherError) -> None:
    if isinstance(end, Mapping) and end.get("end") in ("changed", "refused", "failed"):
        raise failure(origin.machine.node, end)


def _is_final(end: Mapping[str, Any] | LauncherError) -> bool:
    return isinstance(end, Mapping) and end.get("end") in ("room", "refused", "failed")


def _is_whole(end: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(end, Mapping) and end.get("end") == "whole" and bool(end.get("content"))


def _is_connection_failure(end: Mapping[str, Any] | LauncherError) -> bool:
    """Whether its process worked, but a connection failed."""
    return isinstance(end, Mapping) and end.get("end") in ("lost", "stopped")


def _failures(
    targets: Sequence[Endpoint], source: Any, ends: Mapping[Machine, Mapping[str, Any] | LauncherError]
) -> dict[str, LauncherError]:
    """Return the nodes with failures of their own, or else the node to which a connection was lost, or all."""
    found: dict[str, LauncherError] = {}
    for target in targets:
        end = ends[target.machine]
        if isinstance(end, LauncherError):
            found[target.node] = end
        elif _is_final(end) or end.get("end") == "again":
            found[target.node] = failure(target.node, {"why": "some of its pieces differ from the source", **end})
    if found or isinstance(source, LauncherError):
        return found
    for before, target in zip([source, *(ends[target.machine] for target in targets)], targets, strict=False):
        if isinstance(before, Mapping) and before.get("end") == "lost" and before.get("where") == "downstream":
            return {target.node: failure(target.node, before)}
    cut = {"end": "lost", "why": "a connection between nodes was lost"}
    return {target.node: failure(target.node, cut) for target in targets}


def _round(
    origin: Sender, targets: Sequence[Endpoint], result: Delivered, on_progress: OnProgress
) -> dict[Machine, Mapping[str, Any] | LauncherError]:
    """Run one chain; return the final message of each process, or the error if it has none."""
    names = [f"{secrets.token_hex(4)}-{rank}" for rank in range(len(targets) + 1)]
    keys = certificates(names)
    about = {"source": origin.source.label, "name": origin.source.name}
    orders = [{**origin.order(), "tls": keys[names[0]]}]
    orders += [
        {"role": "sink", "root": target.inside, "label": origin.source.label, "about": {**about, "image": target.image}}
        | {"upstream": names[rank], "tls": keys[names[rank + 1]]}
        for rank, target in enumerate(targets)
    ]
    argvs = [origin.argv(), *(target.argv() for target in targets)]
    machines = [origin.machine, *(target.machine for target in targets)]
    with ExitStack() as held:
        started = run_all_settled([partial(_start, *each) for each in zip(machines, argvs, orders, strict=True)])
        workers = [each for each in started if not isinstance(each, LauncherError)]
        for each, _ in workers:
            held.enter_context(closing(each))
        if len(workers) < len(machines):
            return {
                machine: each if isinstance(each, LauncherError) else {"end": "stopped"}
                for machine, each in zip(machines, started, strict=True)
            }
        facts = [target.facts for target in targets]
        following: list[dict[str, Any]] = []
        for rank, target in enumerate(targets):
            others = [node for node in facts if node is not target.facts]
            port = workers[rank + 1][1]
            addresses = [[ip, port] for ip in candidates([target.facts, *others], target.address)]
            following.append({"addresses": addresses, "name": names[rank + 1]})
        if origin.endpoint is None:  # this machine may reach the nodes only by ssh
            through = held.enter_context(forwarded(targets[0].machine, workers[1][1]))
            following[0]["addresses"].append(["127.0.0.1", through])
        for (each, _), order in zip(workers, [*following, None], strict=True):
            each.send(order)
        over = threading.Event()
        steps = [partial(_attend, each, over, on_progress) for each, _ in workers]
        ends: list[Mapping[str, Any] | LauncherError] = [*run_all_settled(steps)]
        result.sent += workers[0][0].counted["sent"]
        for each, _ in workers[1:]:
            result.received[each.node] += each.counted["received"]
        return dict(zip(machines, ends, strict=True))


def _start(machine: Machine, argv: Sequence[str], order: Mapping[str, Any]) -> tuple[Worker, int]:
    """Start a process; return its port, 0 for the source. Raises DataFailed, NodeUnreachable, NodeUnfit."""
    made = Worker(machine, argv, order)
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
    with closing(Worker(endpoint.machine, endpoint.argv(), order)) as process:
        while True:
            message = process.report(1.0)
            if message and "damaged" in message:
                return [*message["damaged"]]
            if message and "end" in message:
                raise failure(endpoint.node, message)
            if time.monotonic() - process.heard > SILENCE:
                raise DataFailed(endpoint.node, f"did not respond for {SILENCE:.0f} s", "check the load of the node")
