"""What happens on all nodes of a run, as one stream of messages: output, progress, ends, lost and regained connections.

Two threads a node: one waits for its container, one follows its files; one more collects files for all nodes. All of
them only read, so that a run can be left at any moment and followed again, from here or from another machine.
"""

from __future__ import annotations

import posixpath
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial

from launcher.errors import LauncherError, NodeUnreachable, NoRoomHere
from launcher.logs.position import PIECE
from launcher.node.files import Follower
from launcher.records.collect import Collected, append, collect, output_folders
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, parse_object
from launcher.run import attempts
from launcher.run.locate import Attached
from launcher.run.messages import (
    Message,
    NodeBack,
    NodeEnded,
    NodeGone,
    NodeLost,
    NodeRestarted,
    NotCollected,
    Output,
    Progress,
    Tick,
)

TICK = 0.2  # seconds without a message until a Tick
QUIET = 5.0  # seconds until the thread of a quiet file checks whether it is still wanted
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

    def __init__(self, attached: Attached, shown: Sequence[Followed], *, resumed: bool) -> None:
        """shown: at most one file a node. resumed: the run was started before; earlier restarts are not reported."""
        self._attached = attached
        self._resumed = resumed
        self._queue: queue.SimpleQueue[Message | BaseException | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._due = threading.Event()  # something is to be collected now
        files = {followed.node.name: followed for followed in shown}
        self._nodes = [_Node(node, files.get(node.name), attached, self._queue.put) for node in attached.nodes]

    @property
    def not_collected(self) -> Mapping[str, LauncherError]:
        """Nodes whose files could not be collected at the end, with the reason."""
        return {node.name: node.problem for node in self._nodes if node.problem is not None}

    def messages(self) -> Iterator[Message]:
        """Every message as it comes."""
        steps = [partial(step, node) for node in self._nodes for step in (self._wait_for, self._read)]
        for job in (jobs := [*steps, self._collect]):
            threading.Thread(target=self._run, args=(job,), daemon=True).start()
        running = len(jobs)
        while running:
            try:
                message = self._queue.get(timeout=TICK)
            except queue.Empty:
                yield Tick()
                continue
            if isinstance(message, BaseException):
                raise message
            if message is None:
                running -= 1
            else:
                yield message

    def close(self) -> None:
        """Stop following; the run goes on. Threads that wait for a node are not waited for: they only read."""
        self._stop.set()
        self._due.set()
        for node in self._nodes:
            node.collected.set()

    def _run(self, job: Callable[[], None]) -> None:
        """A job that fails ends the whole: messages() raises its error, and no other one may wait for it for ever."""
        try:
            job()
            self._queue.put(None)
        except BaseException as error:  # noqa: BLE001 - raised where the messages are read
            self.close()
            self._queue.put(error)

    def _wait_for(self, node: _Node) -> None:
        """Until the container has ended for good, over any number of cut connections."""
        failures, since = 0, 0.0
        while not self._stop.is_set():
            try:
                state = node.engine.wait(node.container, WAIT)
            except LauncherError as error:
                if failures == 0:
                    since, node.away = time.monotonic(), True
                    self._queue.put(NodeLost(node.name, str(error)))
                others_ended = all(other.ended for other in self._nodes if other is not node)
                if others_ended and time.monotonic() - since > GIVE_UP:
                    self._queue.put(NodeGone(node.name, str(error)))
                    node.collected.set()  # as far as it ever will be
                    break
                self._stop.wait(RETRY[min(failures, len(RETRY) - 1)])
                failures += 1
                continue
            if failures:
                self._queue.put(NodeBack(node.name))
                failures, node.away = 0, False
            if state.phase.ended:
                self._queue.put(NodeEnded(node.name, state))
                break
        node.end()
        self._due.set()

    def _read(self, node: _Node) -> None:
        """Its files as they grow; what they have grown by until its end is collected by then, and read here."""
        if self._resumed:
            node.skip_known_starts()
        while not (node.ended or self._stop.is_set()):
            try:
                with closing(node.follow()) as follower:
                    while not (node.ended or self._stop.is_set()):
                        if found := follower.next(QUIET):
                            node.take(*found)
            except LauncherError:  # the thread that waits for the container reports it; the offsets are kept
                if not node.ended:
                    self._stop.wait(RETRY[0])
        node.collected.wait()
        if not self._stop.is_set():
            node.take_the_rest()

    def _collect(self) -> None:
        """TensorBoard logs and the like now and then; everything of a node that has ended, at once."""
        pause, missed = COLLECT_EVERY, dict[str, None]()
        while left := [node for node in self._nodes if not node.collected.is_set()]:
            self._due.wait(pause)
            self._due.clear()
            if self._stop.is_set():
                return
            ended = [node for node in left if node.ended]
            wanted = ended or [node for node in left if not node.away]
            folders = output_folders(self._attached.engines, [node.node for node in wanted])
            record = self._attached.record
            results = collect(folders, record.paths.root, mask=record.mask)
            new = any(isinstance(result, Collected) and result.moved for result in results)
            pause = COLLECT_EVERY if new else min(2 * pause, COLLECT_SELDOM)
            outcomes = {name: result for folder, result in zip(folders, results, strict=True) for name in folder.nodes}
            for node in ended:
                outcome = outcomes[node.name]
                failed = isinstance(outcome, LauncherError)
                if failed and not isinstance(outcome, NoRoomHere) and time.monotonic() - node.ended < GIVE_UP:
                    pause = RETRY[0]
                    continue
                if isinstance(outcome, NodeUnreachable):
                    node.problem = outcome
                else:
                    missed |= dict.fromkeys(map(str, outcome.problems if isinstance(outcome, Collected) else [outcome]))
                node.collected.set()
        for reason in missed:  # once, where nodes share a folder
            self._queue.put(NotCollected(reason))


class _Node:
    """One node: how far its files have been read, as messages, and its end.

    Each byte is reported once, whatever happens to the connection.
    """

    def __init__(
        self, node: NodeOfRun, shown: Followed | None, attached: Attached, put: Callable[[Message], None]
    ) -> None:
        own = NodePaths(node.output, node.name)
        self.node = node
        self.name, self.container = node.name, node.container
        self.engine = attached.engines[node.name]
        self.away = False  # it does not answer now
        self.ended = 0.0  # of time.monotonic()
        self.collected = threading.Event()  # its files are here, or never will be
        self.problem: LauncherError | None = None  # why not
        self._put = put
        self._record = attached.record
        self._follower: Follower | None = None
        self._attempts, self._metrics = own.attempts, own.metrics
        self._attempts_text = b""
        self._known_starts = 0
        self._path = shown.path if shown else ""
        self._offset = shown.offset if shown else 0
        self._lines = {own.attempts: 0} | ({own.metrics: 0} if node.rank == 0 else {})

    def end(self) -> None:
        """Its files are not waited for any more."""
        self.ended = time.monotonic()
        if self._follower is not None:
            self._follower.end()

    def follow(self) -> Follower:
        """Its files from where they have been read to. Raises NodeUnreachable."""
        self._follower = self.engine.files.follow(self._path, self._offset, self._lines)
        return self._follower

    def skip_known_starts(self) -> None:
        try:
            text = self.engine.files.read(self._attempts, limit=attempts.LIMIT)
        except (FileNotFoundError, LauncherError):
            return
        self._known_starts = len(attempts.parse(text))

    def take(self, path: str, data: bytes) -> None:
        """Report it, and keep it in runs/."""
        offset = self._report(path, data)
        with suppress(OSError):  # a full disk here: collect() reports it
            append(self._record.paths.root, self._relative(path), offset, data, self._record.mask)

    def take_the_rest(self) -> None:
        """What the collected files have beyond what was reported."""
        for path, offset in {self._path: self._offset, **self._lines}.items():
            local = self._record.paths.root / self._relative(path)
            if not path or not local.is_file():
                continue
            with suppress(OSError), local.open("rb") as file:
                file.seek(offset)
                read = file.read if path == self._path else file.readline  # lines are not cut
                while data := read(PIECE):
                    self._report(path, data)
        if self._path and self._offset == 0:
            # The entry script never ran, or could not write: the engine's own log is all there is.
            try:
                caught = self.engine.logs(self.container)
            except LauncherError:  # reported by the thread that waits for the container
                return
            if caught:
                self._put(Output(self.name, caught))

    def _report(self, path: str, data: bytes) -> int:
        """Returns its offset in the file."""
        if path == self._path:
            offset, self._offset = self._offset, self._offset + len(data)
            self._put(Output(self.name, data))
            return offset
        offset, self._lines[path] = self._lines[path], self._lines[path] + len(data)
        if path == self._metrics:
            for line in data.split(b"\n"):
                if found := parse_object(line):
                    self._put(Progress(found))
        else:
            self._attempts_text = (self._attempts_text + data)[: attempts.LIMIT]
            starts = attempts.parse(self._attempts_text)
            for place in range(max(1, self._known_starts), len(starts)):
                self._put(NodeRestarted(self.name, place, starts[place - 1].why()))
            self._known_starts = max(self._known_starts, len(starts))
        return offset

    def _relative(self, path: str) -> str:
        return posixpath.relpath(path, self.node.output) if path else ""
