"""One reading of an image handed to all nodes that lack it, to each without the members that it does not need."""

from __future__ import annotations

import io
import queue
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain, takewhile

from launcher.errors import ImageShipFailed, LauncherError
from launcher.image.export import export
from launcher.model.facts import ImageInfo
from launcher.node.engine import Engine

ROOM = 32  # pieces, of 1 MiB at most, that a reader may lag behind: enough to bridge a pause, little beside an image
BLOCK = 512
ARCHIVE_END = bytes(2 * BLOCK)


class Channel:
    """Archives on their way to one node: one thread writes, another one reads, at most `room` pieces behind."""

    def __init__(self, leave_out: frozenset[str] = frozenset(), room: int = ROOM) -> None:
        """leave_out: members of archives that the node does not need."""
        self.leave_out = leave_out
        self.abandoned = False
        # b"" ends an archive, None all of them
        self._queue: queue.Queue[bytes | LauncherError | None] = queue.Queue(room)
        self._pieces = self._read()

    def put(self, piece: bytes | LauncherError | None) -> None:
        """Wait for room, then hand over; dropped if the reader has given up."""
        if not self.abandoned:
            self._queue.put(piece)

    def end_archive(self) -> None:
        self.put(ARCHIVE_END)
        self.put(b"")

    def close(self, error: LauncherError | None = None) -> None:
        """No more archives; `error` is raised at the reader instead, in the middle of an archive too."""
        self.put(error)

    def give_up(self) -> None:
        """The reader's side: nothing more will be read; frees a writer that waits."""
        self.abandoned = True
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()

    def archives(self) -> Iterator[Iterator[bytes]]:
        """One iterator of pieces per archive; what the reader leaves of one is skipped."""
        for first in self._pieces:
            archive = chain([first], takewhile(bool, self._pieces))
            yield archive
            for _ in archive:
                pass

    def _read(self) -> Iterator[bytes]:
        while (piece := self._queue.get()) is not None:
            if isinstance(piece, LauncherError):
                raise piece
            yield piece


def read_once(source: Engine, info: ImageInfo, known: int, channels: Sequence[Channel], chunk: int) -> None:
    """Read the image once, from its `known` lower layers on, for all channels. An error goes to their readers."""
    error: LauncherError | None = None
    try:
        with closing(export(source, info, known, chunk)) as pieces:
            hand_out(pieces, channels)
    except LauncherError as failure:
        error = failure
    except (tarfile.TarError, OSError) as failure:
        error = ImageShipFailed(source.node, f"reading image {info.id[:19]} failed: {failure}", "try again")
    for channel in channels:
        channel.close(error)


def hand_out(pieces: Iterable[bytes], channels: Sequence[Channel]) -> None:
    """The members of one archive after another, until they end or all readers have given up.

    Raises tarfile.ReadError for a stream that breaks off.
    """
    stream = _Stream(pieces)
    end = 0  # of the previous member: only the zeros at the end of an archive stand between two
    for member in tarfile.TarFile(fileobj=stream, ignore_zeros=True):
        if end and member.offset > end:
            for channel in channels:
                channel.end_archive()
        size = member.size + -member.size % BLOCK if member.isreg() else 0
        end = member.offset_data + size
        wanted = [channel for channel in channels if member.name not in channel.leave_out]
        for piece in chain([member.tobuf(tarfile.PAX_FORMAT)], stream.pieces(size)):
            for channel in wanted:
                channel.put(piece)
            if all(channel.abandoned for channel in channels):
                return
        if stream.tell() < end:
            raise tarfile.ReadError("it ends in the middle of a member")
    if stream.tell() < end + len(ARCHIVE_END) or stream.tell() % BLOCK:
        raise tarfile.ReadError("it ends in the middle of an archive")
    for channel in channels:
        channel.end_archive()


class _Stream(io.RawIOBase):
    """Pieces of any size as a file: for tarfile, which reads headers, and for contents, which are not joined."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        super().__init__()
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")
        self._position = 0

    def tell(self) -> int:
        return self._position

    def pieces(self, size: int) -> Iterator[bytes]:
        """`size` bytes, fewer only at the end of the stream."""
        while size:
            if not self._rest:
                self._rest = memoryview(next(self._pieces, b""))
            if not self._rest:
                return
            part, self._rest = self._rest[:size], self._rest[size:]
            self._position += len(part)
            size -= len(part)
            yield bytes(part)

    def read(self, size: int = -1, /) -> bytes:
        return b"".join(self.pieces(size))
