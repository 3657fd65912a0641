"""What happens on all nodes of a run, as one stream of messages: output, progress, ends, lost and regained connections.

Two threads a node: one waits for its container, one follows its files; one more brings files here for all nodes. All of
them only read, so that a run can be left at any moment and followed again, from here or from another machine.
"""

from __future__ import annotations

import posixpath
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from launcher.errors import LauncherError
from launcher.logs.position import PIECE
from launcher.node.engine import Engine
from launcher.node.files import Follower
from launcher.records.collect import append, collect, output_folders
from launcher.records.paths import NodePaths, RunPaths
from launcher.records.store import NodeOfRun
from launcher.run import attempts
from launcher.run.messages import (
    Message,
    NodeBack,
    NodeEnded,
    NodeGone,
    NodeLost,
    NodeRestarted,
    Output,
    Progress,
    Tick,
    fields,
)

T = TypeVar("T")
TICK = 0.2  # seconds without a message until a Tick
TICK_OF_A_FILE = 5.0  # seconds until a quiet file's thread looks whether it is still wanted
COLLECT_EVERY = 5.0
COLLECT_SELDOM = 30.0  # while nothing is new
WAIT = 30.0  # one wait call; then it is asked again, so that a silent cut is noticed
RETRY = (1.0, 2.0, 4.0, 8.0, 15.0)
GIVE_UP = 30.0  # a node that stays away so long after all others have ended is lost


@dataclass(frozen=True)
class Followed:
    """A file whose content is shown: whose, and from where on."""

    node: NodeOfRun
    path: str
    offset: int = 0


class Follow:
    """Follows the nodes of a run; `messages` ends when every container has and all files of theirs are here."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        nodes: Sequence[NodeOfRun],
        shown: Sequence[Followed],
        paths: RunPaths,
        *,
        resumed: bool = False,
    ) -> None:
        """engines: by the node's name in the run. shown: at most one file a node. paths: where files are brought to.

        resumed: the run was started before; restarts that it had until now are not told.
        """
        self._engines = engines
        self._nodes = nodes
        self._shown = {followed.node.name: followed for followed in shown}
        self._paths = paths
        self._resumed = resumed
        self._queue: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._due = threading.Event()  # something is to be brought here now
        self._at_end = {node.name: _AtEnd() for node in nodes}
        self._running = 0  # threads whose end has not been seen

    @property
    def not_brought(self) -> Mapping[str, LauncherError]:
        """Nodes whose files could not be brought at the end, with the reason."""
        return {name: end.problem for name, end in self._at_end.items() if end.problem is not None}

    def messages(self) -> Iterator[Message]:
        """Every message as it comes. The caller may be interrupted and call again: no message is lost."""
        if not self._running:
            self._begin()
        while self._running:
            try:
                message = self._queue.get(timeout=TICK)
            except queue.Empty:
                yield Tick()
                continue
            if message is None:
                self._running -= 1
            else:
                yield message

    def close(self) -> None:
        """Stop following; the run goes on. Threads that wait for a node are not waited for: they only read."""
        self._stop.set()
        self._due.set()

    def _begin(self) -> None:
        jobs = [partial(step, node) for node in self._nodes for step in (self._wait_for, self._follow)]
        for job in [*jobs, self._collect]:
            self._running += 1
            threading.Thread(target=self._run, args=(job,), daemon=True).start()

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        finally:
            self._queue.put(None)

    def _wait_for(self, node: NodeOfRun) -> None:
        """Until the container has ended for good, over any number of cut connections."""
        engine, end, failures, since = self._engines[node.name], self._at_end[node.name], 0, 0.0
        while not self._stop.is_set():
            try:
                state = engine.wait(node.container, WAIT)
            except LauncherError as error:
                if failures == 0:
                    since = time.monotonic()
                    self._queue.put(NodeLost(node.name, str(error)))
                if self._others_ended(node) and time.monotonic() - since > GIVE_UP:
                    self._queue.put(NodeGone(node.name, str(error)))
                    end.brought.set()  # as far as it ever will be
                    break
                self._stop.wait(RETRY[min(failures, len(RETRY) - 1)])
                failures += 1
                continue
            if failures:
                self._queue.put(NodeBack(node.name))
                failures = 0
            if state.phase.ended:
                self._queue.put(NodeEnded(node.name, state))
                break
        end.ended = time.monotonic()
        end.wake()
        self._due.set()

    def _others_ended(self, node: NodeOfRun) -> bool:
        return all(end.ended for name, end in self._at_end.items() if name != node.name)

    def _follow(self, node: NodeOfRun) -> None:
        """Its files as they grow; what they have grown by until its end is brought by then, and read here."""
        end, files = self._at_end[node.name], self._engines[node.name].files
        reader = _Reader(node, self._shown.get(node.name), self._queue, self._paths)
        if self._resumed:
            reader.known_starts = len(self._tried(lambda: attempts.read(files, node.output, node.name)) or ())
        while not (end.ended or self._stop.is_set()):
            try:
                with closing(files.follow(reader.path, reader.offset, reader.lines)) as follower:
                    end.follower = follower
                    while not (end.ended or self._stop.is_set()):
                        if found := follower.next(TICK_OF_A_FILE):
                            reader.take(*found)
            except LauncherError:  # the thread that waits for the container tells of it; the offsets are kept
                if not end.ended:
                    self._stop.wait(RETRY[0])
        end.brought.wait()
        if self._stop.is_set():
            return
        reader.take_the_rest()
        if reader.path and reader.offset == 0:
            # The entry script never ran, or could not write: the engine's own log is all there is.
            caught = self._tried(lambda: self._engines[node.name].logs(node.container))
            if caught:
                self._queue.put(Output(node.name, caught))

    def _tried(self, ask: Callable[[], T]) -> T | None:
        """None when the node does not answer now: the thread that waits for its container tells of that."""
        try:
            return ask()
        except LauncherError:
            return None

    def _collect(self) -> None:
        """TensorBoard logs and the like now and then; everything of a node that has ended, at once."""
        pause = COLLECT_EVERY
        while not all(end.brought.is_set() for end in self._at_end.values()):
            self._due.wait(pause)
            self._due.clear()
            if self._stop.is_set():
                for end in self._at_end.values():
                    end.brought.set()
                return
            ended = {name for name, end in self._at_end.items() if end.ended and not end.brought.is_set()}
            nodes = [
                n for n in self._nodes if (n.name in ended if ended else not self._at_end[n.name].brought.is_set())
            ]
            folders = output_folders(self._engines, nodes)
            results = collect(folders, self._paths.root)
            new = any(isinstance(result, int) and result for result in results)
            pause = COLLECT_EVERY if new else min(2 * pause, COLLECT_SELDOM)
            for folder, result in zip(folders, results, strict=True):
                for name in ended & set(folder.nodes):
                    end = self._at_end[name]
                    if isinstance(result, LauncherError) and time.monotonic() - end.ended < GIVE_UP:
                        pause = RETRY[0]
                        continue
                    end.problem = result if isinstance(result, LauncherError) else None
                    end.brought.set()


class _AtEnd:
    """The end of one node."""

    def __init__(self) -> None:
        self.ended = 0.0  # of time.monotonic()
        self.brought = threading.Event()  # its files are here, or never will be
        self.problem: LauncherError | None = None  # why not
        self.follower: Follower | None = None

    def wake(self) -> None:
        """Its files are not waited for any more."""
        if self.follower is not None:
            self.follower.end()


class _Reader:
    """What one node's files have grown by, as messages. Each byte is told once, whatever happens to the connection."""

    def __init__(
        self, node: NodeOfRun, shown: Followed | None, queue: queue.SimpleQueue[Message | None], paths: RunPaths
    ) -> None:
        own = NodePaths(node.output, node.name)
        self._node = node
        self._queue = queue
        self._root = paths.root
        self._attempts, self._metrics = own.attempts, own.metrics
        self._attempts_text = b""
        self.known_starts = 0
        self.path = shown.path if shown else ""
        self.offset = shown.offset if shown else 0
        self.lines = {own.attempts: 0} | ({own.metrics: 0} if node.rank == 0 else {})

    def take(self, path: str, data: bytes) -> None:
        """Tell it, and keep it in runs/."""
        offset = self._tell(path, data)
        append(self._root, self._relative(path), offset, data)

    def take_the_rest(self) -> None:
        """What the files as they were brought here have beyond what was told."""
        for path, offset in {self.path: self.offset, **self.lines}.items():
            local = self._root / self._relative(path)
            if not path or not local.is_file():
                continue
            with local.open("rb") as file:
                file.seek(offset)
                while data := file.read(PIECE if path == self.path else -1):  # lines are not cut
                    self._tell(path, data)

    def _tell(self, path: str, data: bytes) -> int:
        """Where it was in the file."""
        if path == self.path:
            offset, self.offset = self.offset, self.offset + len(data)
            self._queue.put(Output(self._node.name, data))
            return offset
        offset, self.lines[path] = self.lines[path], self.lines[path] + len(data)
        if path == self._metrics:
            for line in data.split(b"\n"):
                if found := fields(line):
                    self._queue.put(Progress(found))
        else:
            self._attempts_text += data
            found_attempts = attempts.parse(self._attempts_text)
            for place in range(max(1, self.known_starts), len(found_attempts)):
                self._queue.put(NodeRestarted(self._node.name, place, found_attempts[place - 1].why()))
            self.known_starts = max(self.known_starts, len(found_attempts))
        return offset

    def _relative(self, path: str) -> str:
        return posixpath.relpath(path, self._node.output) if path else ""
