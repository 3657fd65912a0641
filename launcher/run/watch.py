"""What happens on all nodes of a run, as one stream of messages: output, progress, ends, lost and regained connections.

One thread a node waits for its container; one follows the files that are to be shown; one brings TensorBoard logs here.
All of them only read, so a watch can be cut at any moment and begun again by anybody.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.errors import LauncherError
from launcher.logs.follow import Tail
from launcher.model.container import ContainerState
from launcher.node.engine import Engine
from launcher.records.collect import collect
from launcher.records.paths import NodePaths, RunPaths
from launcher.records.store import NodeOfRun
from launcher.run import attempts

POLL_LOG = 0.04  # seconds between two looks at the log: somebody waits for its next line
POLL_METRICS = 0.25
COLLECT_EVERY = 5.0
ATTEMPTS_EVERY = 2.0
WAIT = 30.0  # one wait call; then it is asked again, so that a silent cut is noticed
RETRY = (1.0, 2.0, 4.0, 8.0, 15.0)
GIVE_UP = 30.0  # a node that stays away so long after all others have ended is lost


@dataclass(frozen=True)
class Output:
    """Bytes that a node's log file has grown by."""

    node: str
    data: bytes


@dataclass(frozen=True)
class Progress:
    """A line of the master's metrics.jsonl."""

    fields: Mapping[str, Any]


@dataclass(frozen=True)
class NodeEnded:
    node: str
    state: ContainerState


@dataclass(frozen=True)
class NodeLost:
    """No connection at the moment; the run may well go on there."""

    node: str
    reason: str


@dataclass(frozen=True)
class NodeBack:
    node: str


@dataclass(frozen=True)
class NodeGone:
    """Given up: all others have ended and this one has not answered for long."""

    node: str
    reason: str


@dataclass(frozen=True)
class Tick:
    """Nothing happened for a moment."""


@dataclass(frozen=True)
class NodeRestarted:
    """Its processes were started again; `why`: how the attempt before ended."""

    node: str
    restarts: int
    why: str


Message = NodeRestarted | Tick | Output | Progress | NodeEnded | NodeLost | NodeBack | NodeGone


@dataclass(frozen=True)
class Source:
    """A file to follow: whose, and from where on."""

    node: NodeOfRun
    path: str
    offset: int = 0


class Watch:
    """Watches the nodes of a run; `messages` ends when every container has and all followed files are drained."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        nodes: Sequence[NodeOfRun],
        sources: Sequence[Source],
        paths: RunPaths | None,
    ) -> None:
        """engines: by the node's name in the run.

        paths: where TensorBoard logs and the like are brought to while it runs; None: they stay where they are.
        """
        self._engines = engines
        self._nodes = nodes
        self._sources = sources
        self._paths = paths
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._ended = {node.name: threading.Event() for node in nodes}
        self._threads: list[threading.Thread] = []

    def messages(self) -> Iterator[Message]:
        """Every message as it comes. The caller may be interrupted and call again: no message is lost."""
        if not self._threads:
            self._begin()
        while True:
            finished = not any(thread.is_alive() for thread in self._threads if not thread.name.startswith("collect"))
            try:
                yield self._queue.get(timeout=0.2)
            except queue.Empty:
                if finished:
                    return
                yield Tick()

    def close(self) -> None:
        """Stop watching; the run goes on. Threads that wait for a node are not waited for: they only read."""
        self._stop.set()

    def _begin(self) -> None:
        for node in self._nodes:
            self._thread(f"wait {node.name}", self._wait_for, node)
        for source in self._sources:
            self._thread(f"follow {source.path}", self._follow, source)
        self._thread("progress", self._progress, self._nodes[0])
        self._thread("collect attempts", self._count_attempts)
        if self._paths is not None:
            self._thread("collect", self._collect, self._paths)

    def _thread(self, name: str, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait_for(self, node: NodeOfRun) -> None:
        """Until the container has ended for good, over any number of cut connections."""
        engine, failures, since = self._engines[node.name], 0, 0.0
        while not self._stop.is_set():
            try:
                state = engine.wait(node.container, WAIT)
            except LauncherError as error:
                if failures == 0:
                    since = time.monotonic()
                    self._queue.put(NodeLost(node.name, str(error)))
                if self._others_ended(node) and time.monotonic() - since > GIVE_UP:
                    self._queue.put(NodeGone(node.name, str(error)))
                    self._ended[node.name].set()
                    return
                self._stop.wait(RETRY[min(failures, len(RETRY) - 1)])
                failures += 1
                continue
            if failures:
                self._queue.put(NodeBack(node.name))
                failures = 0
            if state.phase.ended:
                self._queue.put(NodeEnded(node.name, state))
                self._ended[node.name].set()
                return

    def _others_ended(self, node: NodeOfRun) -> bool:
        return all(event.is_set() for name, event in self._ended.items() if name != node.name)

    def _follow(self, source: Source) -> None:
        engine = self._engines[source.node.name]
        seen = False
        for data in self._grown(Tail(engine.files, source.path, source.offset), source.node, POLL_LOG):
            seen = True
            self._queue.put(Output(source.node.name, data))
        if not seen and source.offset == 0 and not self._stop.is_set():
            # The entry script never ran, or could not write: what the engine itself caught is all there is.
            caught = self._tried(lambda: engine.logs(source.node.container))
            if caught:
                self._queue.put(Output(source.node.name, caught))

    def _progress(self, master: NodeOfRun) -> None:
        engine = self._engines[master.name]
        rest = b""
        path = NodePaths(master.output, master.name).metrics
        for data in self._grown(Tail(engine.files, path), master, POLL_METRICS):
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                if found := fields(line):
                    self._queue.put(Progress(found))

    def _grown(self, tail: Tail, node: NodeOfRun, pause: float) -> Iterator[bytes]:
        """Pieces as the file grows, until its node has ended and everything was read."""
        ended = self._ended[node.name]
        while not self._stop.is_set():
            last_look = ended.is_set()  # before the read: what was written until the end is seen by it
            data = self._tried(tail.read)
            if data:
                yield data
            elif data is None:
                self._stop.wait(1.0)
                if last_look:
                    return
            elif last_look:
                return
            else:
                self._stop.wait(pause)

    def _tried(self, read: Any) -> bytes | None:
        """None when the node does not answer now: the waiting thread reports that, and the offset is kept."""
        try:
            value: bytes = read()
        except LauncherError:
            return None
        return value

    def _count_attempts(self) -> None:
        """Tell of every restart from now on."""
        known: dict[str, int] = {}
        while not self._stop.is_set():
            last_look = all(event.is_set() for event in self._ended.values())
            for node in self._nodes:
                try:
                    found = attempts.read(self._engines[node.name].files, node.output, node.name)
                except LauncherError:
                    continue  # the waiting thread reports that
                before = known.setdefault(node.name, max(1, len(found)))
                for place in range(before, len(found)):
                    self._queue.put(NodeRestarted(node.name, place, found[place - 1].why()))
                known[node.name] = max(before, len(found))
            if last_look:
                return
            self._stop.wait(ATTEMPTS_EVERY)

    def _collect(self, paths: RunPaths) -> None:
        while not self._stop.wait(COLLECT_EVERY):
            if all(event.is_set() for event in self._ended.values()):
                return  # the rest is brought over once, at the end, by whoever finishes the run
            for node in self._nodes:
                self._tried(lambda node=node: collect(self._engines[node.name].files, node.output, paths.root))


def fields(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl; None for what is not a JSON object (the file belongs to the user's program)."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
