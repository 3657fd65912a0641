"""One reading of an image handed to all nodes that lack it: to each the archives, and of them the members, it needs."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain

from launcher.errors import ImageShipFailed, LauncherError
from launcher.image import tar_stream
from launcher.image.export import export
from launcher.model.facts import ImageInfo
from launcher.node.engine import Engine

ROOM = 32 << 20  # bytes that a reader may lag behind: enough to bridge a pause, little beside an image
_END = b""  # of one archive


class Channel:
    """Archives on their way to one node: one thread writes, another one reads, at most `room` bytes behind."""

    def __init__(self, known: int = 0, leave_out: frozenset[str] = frozenset(), room: int = ROOM) -> None:
        """known: how many layers the node has. leave_out: members of archives that it does not need."""
        self.known = known
        self.leave_out = leave_out
        self._room = room
        self._held = 0
        self._pieces: deque[bytes] = deque()
        self._closed = False
        self.abandoned = False
        self._error: BaseException | None = None
        self._change = threading.Condition()

    def put(self, piece: bytes) -> bool:
        """Wait for room, then hand over; False if the reader has given up."""
        with self._change:
            self._change.wait_for(lambda: self.abandoned or self._held < self._room)
            if not self.abandoned:
                self._pieces.append(piece)
                self._held += len(piece)
                self._change.notify_all()
            return not self.abandoned

    def end_archive(self) -> None:
        self.put(tar_stream.end())
        self.put(_END)

    def close(self, error: BaseException | None = None) -> None:
        """No more archives; with `error` the reader gets it raised instead, in the middle of an archive too."""
        with self._change:
            self._closed, self._error = True, error
            self._change.notify_all()

    def give_up(self) -> None:
        """The reader's side: nothing more will be read; frees a writer that waits."""
        with self._change:
            self.abandoned = True
            self._pieces.clear()
            self._change.notify_all()

    def archives(self) -> Iterator[Iterator[bytes]]:
        """One iterator of pieces per archive; what the reader leaves of one is skipped."""
        while first := self._get():
            archive = self._archive(first)
            yield archive
            for _ in archive:
                pass

    def _archive(self, piece: bytes | None) -> Iterator[bytes]:
        while piece:
            yield piece
            piece = self._get()

    def _get(self) -> bytes | None:
        """The next piece; None after the last one. Raises the writer's error."""
        with self._change:
            self._change.wait_for(lambda: self._pieces or self._closed)
            if not self._pieces:
                if self._error is not None:
                    raise self._error
                return None
            piece = self._pieces.popleft()
            self._held -= len(piece)
            self._change.notify_all()
            return piece


def read_once(source: Engine, info: ImageInfo, channels: Sequence[Channel], chunk: int) -> None:
    """Read the image once and put every member into the channels that need it; closes all of them in any case."""
    error: BaseException | None = None
    try:
        with closing(export(source, info, min(channel.known for channel in channels), chunk)) as pieces:
            _hand_out(tar_stream.members(pieces), channels, len(info.layers))
    except LauncherError as failure:
        error = failure
    except (tar_stream.TruncatedError, OSError) as failure:
        error = ImageShipFailed(source.node, f"reading image {info.id[:19]} failed: {failure}", "try again")
    except BaseException as failure:
        error = failure
        raise
    finally:
        for channel in channels:
            channel.close(error)


def _hand_out(members: Iterator[tar_stream.Member], channels: Sequence[Channel], layers: int) -> None:
    """Until the stream ends or all readers have given up."""
    number, receiving = -1, list[Channel]()
    for member in members:
        pieces = member.body
        if member.archive != number:
            for channel in receiving:
                channel.end_archive()
            number, reaches = member.archive, layers
            if member.name == "manifest.json":  # the first member only in archives that images/pack.py writes
                manifest = b"".join(member.body)
                reaches = len(json.loads(manifest[: member.size])[0]["Layers"])
                pieces = iter([manifest])
            # A node that has all layers of a part skips it; the last part is the image itself.
            receiving = [channel for channel in channels if reaches > channel.known or reaches == layers]
        wanted = [channel for channel in receiving if member.name not in channel.leave_out]
        for piece in chain([member.head], pieces):
            for channel in wanted:
                channel.put(piece)
            if all(channel.abandoned for channel in channels):
                return
    for channel in receiving:
        channel.end_archive()
