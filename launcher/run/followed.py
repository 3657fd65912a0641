"""The followed files of one node: turn their bytes into messages and append them to the copies in runs/.

Each byte is reported exactly once, even if the connection is lost: reading resumes at the last offset. It is reported
before it is stored, so that a full or slow local disk loses no output.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from launcher.errors import LauncherError
from launcher.local_files import parse_object
from launcher.node.files import Files, Span
from launcher.node.follower import Follower
from launcher.records.paths import NodePaths
from launcher.records.store import NodeOfRun
from launcher.records.writer import append
from launcher.run import attempts, messages
from launcher.run.attempts import World
from launcher.run.locate import Attached
from launcher.run.messages import Message, RankZeroMoved
from launcher.run.restarts import Restarts

QUIET = 5.0  # seconds without data after which the thread checks whether to continue
TO_THE_END = 1 << 60  # bytes
LONGEST_LINE = 1 << 22  # bytes in attempts and metrics; longer lines are split


@dataclass(frozen=True)
class Followed:
    """A file whose content is shown, starting at an offset.

    moves: switch to the log of another node when rank 0 moves there. world: the newest generation that was shown.
    """

    node: NodeOfRun
    path: str
    offset: int = 0
    moves: bool = False
    world: World | None = None


class FollowedFiles:
    """A node's attempts file, the metrics if it has rank 0, and the log if it is shown.

    Not thread-safe, except end(), generation and rank_zero_left().
    """

    def __init__(
        self,
        node: NodeOfRun,
        shown: Followed | None,
        attached: Attached,
        put: Callable[[Message], None],
        moved: Callable[[RankZeroMoved], None],
        most: int,
    ) -> None:
        """moved: called with RankZeroMoved messages; put: with all others. most: maximum bytes stored per file."""
        own, elastic = NodePaths(node.output, node.name), attached.record.min_nodes > 0
        self._node = node
        self._engine = attached.engines[node.name]
        self._record = attached.record
        self._put = put
        self._most = most
        self._restarts = Restarts(node.name, put, moved, elastic=elastic)
        self._attempts = own.attempts
        self._log = shown.path if shown else own.log
        self._shown = shown is not None
        metrics = {own.metrics: 0} if node.rank == 0 and not elastic else {}
        self._offsets = {own.attempts: 0, **metrics, self._log: shown.offset if shown else 0}
        self._stream: Follower | None = None
        if shown and shown.world and shown.world.members[0] == node.name:
            self.rank_zero_came(shown.world, shown=False)

    @property
    def generation(self) -> int:
        """The generation in which the node takes part, in a job with min_nodes; 0: none."""
        return self._restarts.generation

    def rank_zero_came(self, world: World, *, shown: bool) -> None:
        """Follow the metrics of this generation and, if `shown`, this node's log."""
        metrics = f"{NodePaths(self._node.output, self._node.name).in_generation(world.number, 0)}/metrics.jsonl"
        begin = self._offsets[self._log]
        if shown and not self._shown:
            self._shown, begin = True, max(begin, world.offset)
        self._offsets = {self._attempts: self._offsets[self._attempts], metrics: 0, self._log: begin}

    def rank_zero_left(self) -> None:
        self._shown = False

    def skip_known_starts(self) -> None:
        with suppress(FileNotFoundError, LauncherError):
            self._restarts.skip(self._engine.files.read(self._attempts, limit=attempts.LIMIT, below=self._node.output))

    def follow(self, running: Callable[[], bool]) -> None:
        """Report appended data while running() is true. Raises NodeUnreachable."""
        while running():
            now = self._wanted()
            lines = {path: self._offsets[path] for path in now if path != self._log}
            log, start = self._log if self._log in now else "", self._offsets[self._log]
            files = self._engine.files
            with closing(files.follow(log, start, lines, below=self._node.output)) as stream:
                self._stream = stream
                while running() and now == self._wanted():
                    if found := stream.next(QUIET):
                        self._take(*found)

    def end(self) -> None:
        """Make follow() raise NodeUnreachable, immediately if it is waiting."""
        if self._stream is not None:
            self._stream.end()

    def read_rest(self, files: Files, output: str) -> None:
        """Report the data that was not reported yet; the files no longer grow.

        files, output: of the node, or of the collected copies. Raises NodeUnreachable, NodeUnfit.
        """
        now: tuple[str, ...] = ()
        while now != self._wanted():  # the attempts file may show that rank 0 moved to this node
            now = self._wanted()
            spans = {Span(f"{output}/{self._relative(path)}", self._offsets[path], TO_THE_END): path for path in now}
            with closing(files.read_spans([*spans], below=output)) as pieces:
                for span, group in groupby(pieces, key=itemgetter(0)):
                    path, data = spans[span], (piece for _, piece in group)
                    for piece in data if path == self._log else _whole_lines(data):
                        if path in self._wanted():
                            self._take(path, piece)
        if self._shown and self._offsets[self._log] == 0 and not self._restarts.begun:
            # The entry script did not run or could not write: use the engine's log.
            with suppress(LauncherError):  # reported by the thread that waits for the container
                if caught := self._engine.logs(self._node.container):
                    self._put(messages.Output(self._node.name, caught))

    def _wanted(self) -> tuple[str, ...]:
        return tuple(path for path in self._offsets if self._shown or path != self._log)

    def _take(self, path: str, data: bytes) -> None:
        """Report the data, then store it in runs/, as the node may be lost before its files are collected."""
        offset = self._offsets[path]
        self._offsets[path] += len(data)
        if path == self._log:
            self._put(messages.Output(self._node.name, data))
        elif path == self._attempts:
            self._restarts.add(data)
        else:
            for line in data.split(b"\n"):
                if found := parse_object(line):
                    self._put(messages.Progress(found))
        if offset + len(data) <= self._most:
            with suppress(OSError):  # a full disk: collect() reports it and copies the missing data later
                append(self._record.paths.root / self._relative(path), offset, data, self._record.mask)

    def _relative(self, path: str) -> str:
        return posixpath.relpath(path, self._node.output)


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
