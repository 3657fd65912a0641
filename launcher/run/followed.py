"""One node of a run that is followed: its files as messages, and whether it answers."""

from __future__ import annotations

import posixpath
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from launcher.errors import LauncherError
from launcher.logs.position import PIECE
from launcher.node.follower import Follower
from launcher.records.collect import append
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun, parse_object
from launcher.run import attempts, messages
from launcher.run.attempts import World
from launcher.run.locate import Attached
from launcher.run.messages import Message

UNSAVED = 16 << 20  # bytes of a file that are kept in memory while collect() is at work; then it will copy them


@dataclass(frozen=True)
class Followed:
    """A file whose content is shown: whose, and from where on.

    moves: with rank 0, to the log of another node. world: the newest that has been shown.
    """

    node: NodeOfRun
    path: str
    offset: int = 0
    moves: bool = False
    world: World | None = None


class FollowedNode:
    """One node: how far its files have been read, as messages, and its end.

    Each byte is reported once, whatever happens to the connection.
    """

    def __init__(
        self, node: NodeOfRun, shown: Followed | None, attached: Attached, put: Callable[[Message], None], most: int
    ) -> None:
        """most: bytes of a file that are kept here."""
        own = NodePaths(node.output, node.name)
        self.node = node
        self.name, self.container = node.name, node.container
        self.engine = attached.engines[node.name]
        self.heard = time.time()  # when it last answered, as far as is known
        self.silent_since = 0.0  # of time.monotonic(); 0: it answers
        self.ended = 0.0  # of time.monotonic()
        self.collected = threading.Event()  # its files are here, or never will be
        self.problem: LauncherError | None = None  # why not
        self._put = put
        self._record = attached.record
        self._follower: Follower | None = None
        self._attempts = own.attempts
        self._attempts_text = b""
        self._known_starts = 1  # the first one is no restart
        self._known_worlds = 0
        self._stopped = False
        self._shown = shown is not None
        self._path = shown.path if shown else own.log
        self._offset = shown.offset if shown else 0
        self._most = most
        self._elastic = attached.record.min_nodes > 0
        self._lines = {own.attempts: 0} | ({own.metrics: 0} if node.rank == 0 and not self._elastic else {})
        self._followed: tuple[str, ...] = ()
        self._unsaved: dict[str, tuple[int, bytes]] = {}  # by path: offset and what was reported from there on
        if shown and shown.world and shown.world.members[0] == node.name:
            self.rank_zero_came(shown.world, shown=False)

    def is_silent(self, error: LauncherError) -> None:
        if not self.silent_since:
            self.silent_since = time.monotonic()
            self._put(messages.NodeLost(self.name, str(error), self.heard))

    def answers(self) -> None:
        if self.silent_since:
            self.silent_since = 0.0
            self._put(messages.NodeBack(self.name))
        self.heard = time.time()

    def end(self) -> None:
        """Its files are not waited for any more."""
        self.ended = time.monotonic()
        if self._follower is not None:
            self._follower.end()

    def follow(self) -> Follower:
        """Its files from where they have been read to. Raises NodeUnreachable."""
        self._followed = self._wanted()
        self._follower = self.engine.files.follow(self._followed[0], self._offset, self._lines)
        return self._follower

    @property
    def generation(self) -> int:
        """In which it takes part, in a job with min_nodes; 0: in none."""
        return attempts.joined(self._attempts_text)

    @property
    def changed(self) -> bool:
        """Whether other files are to be followed than are."""
        return self._followed != self._wanted()

    def rank_zero_came(self, world: World, *, shown: bool) -> None:
        """Follow the metrics of this generation and, where it is `shown`, this node's log."""
        metrics = f"{NodePaths(self.node.output, self.name).in_generation(world.number, 0)}/metrics.jsonl"
        self._lines = {self._attempts: self._lines[self._attempts], metrics: 0}
        if shown and not self._shown:
            self._shown, self._offset = True, max(self._offset, world.offset)
            self._unsaved.pop(self._path, None)  # what follows is not next to it; collect() brings both

    def rank_zero_left(self) -> None:
        self._shown = False

    def _wanted(self) -> tuple[str, ...]:
        return (self._path if self._shown else "", *self._lines)

    def skip_known_starts(self) -> None:
        with suppress(FileNotFoundError, LauncherError):
            known = attempts.parse(self.engine.files.read(self._attempts, limit=attempts.LIMIT))
            self._known_starts = max(1, len(known))

    def take(self, path: str, data: bytes) -> None:
        """Report it, and keep it in runs/: the node may be lost before it is collected."""
        offset = self._report(path, data)
        start, before = self._unsaved.get(path, (offset, b""))
        self._unsaved[path] = start, before + data
        self._save(path)

    def _save(self, path: str) -> None:
        record, saved, (start, data) = self._record, False, self._unsaved[path]
        with suppress(OSError):  # a full disk here: collect() reports it
            saved = append(record.paths.root, self._relative(path), start, data, record.mask, self._most)
        if saved or len(data) > UNSAVED:
            del self._unsaved[path]

    def take_the_rest(self) -> None:
        """What the collected files have beyond what was reported."""
        for path in [*self._unsaved]:
            self._save(path)
        self._rest_of(self._attempts, self._lines[self._attempts])  # may bring rank 0 here
        for path, offset in self._lines.items():
            self._rest_of(path, offset)
        if self._shown:
            self._rest_of(self._path, self._offset)
        if self._shown and self._offset == 0 and not self._attempts_text:
            # The entry script never ran, or could not write: the engine's own log is all there is.
            with suppress(LauncherError):  # reported by the thread that waits for the container
                if caught := self.engine.logs(self.container):
                    self._put(messages.Output(self.name, caught))

    def _rest_of(self, path: str, offset: int) -> None:
        local = self._record.paths.root / self._relative(path)
        with suppress(OSError), local.open("rb") as file:
            file.seek(offset)
            read = file.read if path == self._path else file.readline  # lines are not cut
            while data := read(PIECE):
                self._report(path, data)

    def _report(self, path: str, data: bytes) -> int:
        """Returns its offset in the file."""
        if path == self._path:
            offset, self._offset = self._offset, self._offset + len(data)
            self._put(messages.Output(self.name, data))
            return offset
        offset, self._lines[path] = self._lines[path], self._lines[path] + len(data)
        if path == self._attempts:
            self._attempts_text = (self._attempts_text + data)[: attempts.LIMIT]
            self._report_attempts()
        else:
            for line in data.split(b"\n"):
                if found := parse_object(line):
                    self._put(messages.Progress(found))
        return offset

    def _report_attempts(self) -> None:
        """What is new in the file."""
        starts = attempts.parse(self._attempts_text)
        if not self._elastic:  # there the new generation says it
            for place in range(self._known_starts, len(starts)):
                self._put(messages.NodeRestarted(self.name, place, starts[place - 1].why()))
        self._known_starts = max(self._known_starts, len(starts))
        worlds = attempts.parse_worlds(self._attempts_text)
        for world in worlds[self._known_worlds :]:
            if world.members[0] == self.name:
                self._put(messages.RankZeroMoved(self.name, world))
        self._known_worlds = len(worlds)
        if not self._stopped and (by := attempts.stopped_by(self._attempts_text)):
            self._stopped = True
            self._put(messages.NodeStopped(self.name, by))

    def _relative(self, path: str) -> str:
        return posixpath.relpath(path, self.node.output)
