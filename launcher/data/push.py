"""Data brought to every node: a chain of processes, in rounds, until each node has the whole or is left out.

The source sends each byte to one node, which sends it to the next while it comes. When a process or a connection fails,
the round ends, and the next one goes on without what the nodes have, and without a node that keeps failing.
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

from launcher.data import worker
from launcher.data.certificates import certificates
from launcher.data.places import Source
from launcher.data.tunnel import tunnel
from launcher.data.worker import Worker, failure
from launcher.errors import DataFailed, LauncherError, NodeUnreachable
from launcher.model.container import Mount
from launcher.model.facts import NodeFacts
from launcher.model.home import cache_folder
from launcher.model.progress import Log, OnProgress
from launcher.node.machine import Machine
from launcher.node.parallel import run_all_settled
from launcher.planning.rendezvous import candidates

ROOT = "/launcher-data"  # in the containers: this user's folder of copies
SOURCE = "/launcher-source"
TRIES = 3  # of a node, without a byte that came
SILENCE = 30.0  # seconds: a process that reports every half second and does not has hung, or its node
ALTERED = "do not use it: launcher data rm, and look at the nodes before it in the job's order"
GRACE = 5.0  # seconds in which the others say how far they came when one has failed


@dataclass(frozen=True)
class Place:
    """A node that is to have a copy. root: the folder of its copies. address: its own, where the job names one."""

    machine: Machine
    facts: NodeFacts
    root: str
    image: str
    address: str | None = None
    inside: str = ROOT  # the folder as its process sees it

    @property
    def node(self) -> str:
        return self.machine.node

    def argv(self, *more: Mount) -> list[str]:
        return worker.in_container(self.image, self.facts, [Mount(self.root, self.inside), *more])


@dataclass(frozen=True)
class Origin:
    """The source, connected. single: the file's name where it is one file."""

    source: Source
    machine: Machine
    path: str
    single: str
    place: Place | None  # None: this machine, without a container

    def argv(self) -> list[str]:
        if self.place is None:
            return worker.here()
        return self.place.argv(Mount(self.path, self._inside, read_only=True))

    @property
    def _inside(self) -> str:
        return f"{SOURCE}/{self.single}" if self.single else SOURCE

    def order(self) -> dict[str, Any]:
        root = ROOT if self.place else str(cache_folder(os.environ) / "data")
        path = self._inside if self.place else self.path
        return {"role": "source", "path": path, "root": root, "label": self.source.label}


@dataclass
class Delivered:
    """content: the copies' name. sent: bytes that left the source; received: bytes that came, by node."""

    content: str = ""
    sent: int = 0
    received: dict[str, int] = field(default_factory=dict)
    failed: dict[str, LauncherError] = field(default_factory=dict)


def push(origin: Origin, places: Sequence[Place], log: Log, on_progress: OnProgress) -> Delivered:
    """Until every place has the whole, or is in `failed`. Raises DataFailed where the source fails, NodeUnreachable."""
    result, tries = Delivered(received={place.node: 0 for place in places}), dict.fromkeys((p.node for p in places), 0)
    waiting, alone, stuck = list(places), list[Place](), 0
    while waiting or alone:
        if not waiting:  # nodes that no other one reaches
            waiting.append(alone.pop(0))
        before = {place.node: result.received[place.node] for place in waiting}
        ends = _round(origin, waiting, result, on_progress)
        source = ends.pop(origin.machine)
        _refuse_source(origin, source)
        blamed = _blamed(waiting, source, ends)
        for place in list(waiting):
            end = ends[place.machine]
            if _is_whole(end) and _is_whole(source):
                waiting.remove(place)
                result.content = str(source["content"])
                if end["content"] != source["content"]:  # a node before it has altered bytes and hashes alike
                    result.failed[place.node] = DataFailed(place.node, "has other bytes than the source", ALTERED)
            elif error := blamed.get(place.node):
                nothing = result.received[place.node] == before[place.node]
                if origin.place is None and len(before) > 1 and nothing and _lives(end):
                    log(f"{place.node} is not reached by the other nodes: this machine sends to it")
                    waiting.remove(place)
                    alone.append(place)
                    continue
                tries[place.node] = tries[place.node] + 1 if nothing else 1
                if tries[place.node] >= TRIES or isinstance(error, NodeUnreachable) or _is_final(end):
                    result.failed[place.node] = error
                    waiting.remove(place)
                    log(f"{place.node} is left out: {error.what}")
                else:
                    log(f"{place.node}: {error.what}; trying again")
        came = any(result.received[node] > size for node, size in before.items())
        stuck = 0 if came or blamed or _is_whole(source) else stuck + 1
        if stuck >= TRIES or isinstance(source, NodeUnreachable):
            raise source if isinstance(source, LauncherError) else failure(origin.machine.node, source)
    return result


def _refuse_source(origin: Origin, end: Mapping[str, Any] | LauncherError) -> None:
    if isinstance(end, Mapping) and end.get("end") in ("changed", "refused", "failed"):
        raise failure(origin.machine.node, end)


def _is_final(end: Mapping[str, Any] | LauncherError) -> bool:
    return isinstance(end, Mapping) and end.get("end") in ("room", "refused", "failed")


def _is_whole(end: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(end, Mapping) and end.get("end") == "whole"


def _lives(end: Mapping[str, Any] | LauncherError) -> bool:
    """Its process ran to the end, and a connection is what failed."""
    return isinstance(end, Mapping) and end.get("end") in ("lost", "stopped")


def _blamed(
    places: Sequence[Place], source: Any, ends: Mapping[Machine, Mapping[str, Any] | LauncherError]
) -> dict[str, LauncherError]:
    """The nodes that failed by themselves; where none did, those to which a connection was lost."""
    found: dict[str, LauncherError] = {}
    for place in places:
        end = ends[place.machine]
        if isinstance(end, LauncherError):
            found[place.node] = end
        elif _is_final(end) or end.get("end") == "again":
            found[place.node] = failure(place.node, {"why": "some of its pieces were not the source's", **end})
    if found or isinstance(source, LauncherError):
        return found
    for before, place in zip([source, *(ends[place.machine] for place in places)], places, strict=False):
        if isinstance(before, Mapping) and before.get("end") == "lost" and before.get("where") == "downstream":
            return {place.node: failure(place.node, before)}
    return {place.node: failure(place.node, {"end": "lost", "why": "the chain was cut"}) for place in places}


def _round(
    origin: Origin, places: Sequence[Place], result: Delivered, on_progress: OnProgress
) -> dict[Machine, Mapping[str, Any] | LauncherError]:
    """One chain from its start to its end: the last words of each process, or why there are none."""
    names = [f"{secrets.token_hex(4)}-{rank}" for rank in range(len(places) + 1)]
    keys = certificates(names)
    about = {"source": origin.source.label}
    orders = [{**origin.order(), "tls": keys[names[0]]}]
    orders += [
        {"role": "sink", "root": place.inside, "label": origin.source.label, "about": {**about, "image": place.image}}
        | {"upstream": names[rank], "tls": keys[names[rank + 1]]}
        for rank, place in enumerate(places)
    ]
    argvs = [origin.argv(), *(place.argv() for place in places)]
    machines = [origin.machine, *(place.machine for place in places)]
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
        facts = [place.facts for place in places]
        following: list[dict[str, Any]] = []
        for rank, place in enumerate(places):
            others = [node for node in facts if node is not place.facts]
            port = workers[rank + 1][1]
            addresses = [[ip, port] for ip in candidates([place.facts, *others], place.address)]
            following.append({"addresses": addresses, "name": names[rank + 1]})
        if origin.place is None:  # a caller may be far away, and let in by ssh alone
            through = held.enter_context(tunnel(places[0].machine, workers[1][1]))
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
    """With the port of one that others connect to, 0 for the source. Raises DataFailed, NodeUnreachable, NodeUnfit."""
    made = Worker(machine, argv, order)
    try:
        if order["role"] == "source":
            made.until("bytes", timeout=worker.LIST_TIMEOUT)
            return made, 0
        return made, int(made.until("port"))
    except BaseException:
        made.close()
        raise


def _attend(each: Worker, over: threading.Event, on_progress: OnProgress) -> Mapping[str, Any]:
    """To its end. When another one has failed it has a moment to say how far it came. Raises DataFailed, ..."""
    ended_at, total = 0.0, 0
    try:
        while True:
            said = each.report(0.5)
            if said and said.get("end"):
                if said["end"] != "whole":
                    over.set()
                elif total:
                    on_progress(each.node, total, total)
                return said
            if said and said.get("total"):
                total = max(1, int(said["total"]))
                on_progress(each.node, min(int(said["done"]), total - 1), total)  # equal only when it is whole
            if time.monotonic() - each.heard > SILENCE:
                raise DataFailed(each.node, f"said nothing for {SILENCE:.0f} s", "is the node overloaded?")
            if over.is_set():
                ended_at = ended_at or time.monotonic()
                if time.monotonic() - ended_at > GRACE:
                    return {"end": "stopped"}
    except LauncherError:
        over.set()
        raise


def verify(place: Place, content: str) -> list[str]:
    """Read a copy to its end: the files that differ. Raises DataFailed, NodeUnreachable."""
    order = {"role": "verify", "root": place.inside, "content": content}
    with closing(Worker(place.machine, place.argv(), order)) as process:
        while True:
            said = process.report(1.0)
            if said and "damaged" in said:
                return [str(name) for name in said["damaged"]]
            if said and "end" in said:
                raise failure(place.node, said)
            if time.monotonic() - process.heard > SILENCE:
                raise DataFailed(place.node, f"said nothing for {SILENCE:.0f} s", "is the node overloaded?")
