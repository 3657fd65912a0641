"""Read one node of a run: wait for its container, and read its files as they grow.

All that it reads, it hands on as values of type Event: a state of the container, bytes of a file, an error.

A reader only reads. Its methods block, so `follow` calls them in threads; what the events mean, and what is to be
read next, `observed` decides. Each byte is reported exactly once, even if the connection is lost: reading resumes at
the last offset.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from launcher.errors import ContainerGone, LauncherError
from launcher.model.container import ContainerState
from launcher.node.engine import Engine
from launcher.node.files import Files, Span
from launcher.node.tail import Tail
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun

QUIET = 5.0  # seconds without data after which the thread checks whether to continue
TO_THE_END = 1 << 60  # bytes
LONGEST_LINE = 1 << 22  # bytes in attempts and metrics; longer lines are split


@dataclass(frozen=True)
class Event:
    """Something that was read of a node, by its name in the run."""

    node: str


@dataclass(frozen=True)
class StateSeen(Event):
    """The state of its container."""

    state: ContainerState


@dataclass(frozen=True)
class ContainerRemoved(Event):
    """It has no such container."""


@dataclass(frozen=True)
class WaitFailed(Event):
    """A request for the state of its container failed."""

    error: LauncherError


@dataclass(frozen=True)
class Appended(Event):
    """Bytes of a file, from `offset` on; in whole lines, unless it is the log."""

    path: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class EngineLogged(Event):
    """The engine's own log of the container, as the entry script did not run or could not write."""

    data: bytes


@dataclass(frozen=True)
class Wanted:
    """The files to read: from which byte on, by absolute path. log: the one that is sent unchanged; "": none."""

    first_bytes: Mapping[str, int] = field(default_factory=dict)
    log: str = ""


class NodeReader:
    """One node. wait() may run beside the other methods, end() beside any."""

    def __init__(
        self, node: NodeOfRun, engine: Engine, wanted: Callable[[], Wanted], report: Callable[[Event], None]
    ) -> None:
        """wanted: returns the files to read; the answer may change. report: called with each event."""
        self.node = node
        self.name = node.name
        self.engine = engine
        self._wanted = wanted
        self._report = report
        self._reached: dict[str, int] = {}  # offsets
        self._stream: Tail | None = None

    def wait(self, at_most: float) -> None:
        """Report the state of the container: when it has ended, or after `at_most` seconds."""
        event: Event
        try:
            event = StateSeen(self.name, self.engine.wait(self.node.container, at_most))
        except ContainerGone:
            event = ContainerRemoved(self.name)
        except LauncherError as error:
            event = WaitFailed(self.name, error)
        self._report(event)

    def attempts(self, limit: int) -> bytes:
        """Return at most `limit` bytes of its attempts file. Raises FileNotFoundError, NodeUnreachable, NodeUnfit."""
        path = NodePaths(self.node.output, self.name).attempts
        return self.engine.files.read(path, limit=limit, below=self.node.output)

    def follow(self, running: Callable[[], bool]) -> None:
        """Report data as it is appended, while running() is true. Raises NodeUnreachable."""
        while running():
            now = self._wanted()
            lines = {path: self._next_offset(now, path) for path in now.first_bytes if path != now.log}
            start, files = self._next_offset(now, now.log) if now.log else 0, self.engine.files
            with closing(files.tail(now.log, start, lines, below=self.node.output)) as stream:
                self._stream = stream
                while running() and self._wanted() == now:
                    if found := stream.next(QUIET):
                        self._take(now, *found)

    def end(self) -> None:
        """Make follow() raise NodeUnreachable, immediately if it is waiting."""
        if self._stream is not None:
            self._stream.end()

    def read_rest(self, files: Files, output: str) -> None:
        """Report the data that was not reported yet, up to the present ends of the files.

        files, output: of the node, or of copies. Raises NodeUnreachable, NodeUnfit.
        """
        now, wanted = Wanted(), self._wanted()
        while now != wanted:  # the attempts file may show that rank 0 moved to this node
            now = wanted
            paths = {f"{output}/{self.relative(path)}": path for path in now.first_bytes}
            spans = [Span(path, self._next_offset(now, own), TO_THE_END) for path, own in paths.items()]
            with closing(files.read_spans(spans, below=output)) as pieces:
                for span, group in groupby(pieces, key=itemgetter(0)):
                    path, data = paths[span.path], (piece for _, piece in group)
                    for piece in data if path == now.log else _whole_lines(data):
                        if path in self._wanted().first_bytes:  # else rank 0 has moved away meanwhile
                            self._take(now, path, piece)
            wanted = self._wanted()
        if now.log and not any(self._next_offset(now, path) for path in now.first_bytes):
            logged = b""  # nothing was ever read: the entry script did not run, or could not write
            with suppress(LauncherError):  # wait() reports it
                logged = self.engine.logs(self.node.container)
            if logged:
                self._report(EngineLogged(self.name, logged))

    def relative(self, path: str) -> str:
        """Return a path of a file below the run's output folder."""
        return posixpath.relpath(path, self.node.output)

    def _next_offset(self, wanted: Wanted, path: str) -> int:
        return max(wanted.first_bytes[path], self._reached.get(path, 0))

    def _take(self, wanted: Wanted, path: str, data: bytes) -> None:
        offset = self._next_offset(wanted, path)
        self._reached[path] = offset + len(data)
        self._report(Appended(self.name, path, offset, data))


def _whole_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes, split only at line ends."""
    rest = b""
    for piece in pieces:
        whole, end, rest = (rest + piece).rpartition(b"\n")
        if len(rest) > LONGEST_LINE:
            end, rest = end + rest, b""
        if end:
            yield whole + end
    if rest:
        yield rest
