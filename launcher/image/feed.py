"""One reading of an image, handed to all nodes that lack it: archive after archive, each node what it needs of them."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import chain

from launcher.errors import ImageShipFailed, LauncherError
from launcher.image import archive
from launcher.image.export import export
from launcher.image.tee import Pipe
from launcher.node.engine import Engine, ImageInfo


class Line:
    """Archives on their way to one node. One thread writes, another one iterates: a Pipe for each archive, in order."""

    def __init__(self, known: int, leave_out: frozenset[str]) -> None:
        """known: how many layers the node has; leave_out: members of archives that it does not need."""
        self.known = known
        self.leave_out = leave_out
        self._archives: queue.SimpleQueue[Pipe | BaseException | None] = queue.SimpleQueue()
        self._pipe: Pipe | None = None
        self._gone = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The next archive."""
        with self._lock:
            self._pipe = Pipe()
            if self._gone:
                self._pipe.give_up()
            self._archives.put(self._pipe)

    def put(self, piece: bytes) -> bool:
        """False when the node's side has given up."""
        assert self._pipe is not None, "no archive has begun"
        return self._pipe.put(piece)

    def end(self) -> None:
        """The archive is complete."""
        if self._pipe is not None:
            self._pipe.put(archive.end())
            self._pipe.close()
            self._pipe = None

    def close(self, error: BaseException | None = None) -> None:
        """No more archives; with `error` the reader gets it raised, in the middle of an archive too."""
        if self._pipe is not None:
            self._pipe.close(error)
        self._archives.put(error)

    def give_up(self) -> None:
        """The reader's side: nothing will be read any more."""
        with self._lock:
            self._gone = True
            if self._pipe is not None:
                self._pipe.give_up()

    def __iter__(self) -> Iterator[Pipe]:
        while (item := self._archives.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item


def feed(source: Engine, info: ImageInfo, lines: Sequence[Line], chunk: int) -> None:
    """Read the image once and hand every member to the lines that need it; closes them all, whatever happens."""
    error: BaseException | None = None
    try:
        with closing(export(source, info, min(line.known for line in lines), chunk)) as pieces:
            _hand_out(archive.members(pieces), list(lines), len(info.layers))
    except LauncherError as failure:
        error = failure
    except (archive.TruncatedError, OSError) as failure:
        error = ImageShipFailed(source.node, f"reading image {info.id[:19]} failed: {failure}", "try again")
    except BaseException as failure:
        error = failure
        raise
    finally:
        for line in lines:
            line.close(error)


def _hand_out(members: Iterator[archive.Member], alive: list[Line], layers: int) -> None:
    """Until the stream ends or nobody reads it any more."""
    number, taking = -1, list[Line]()
    for member in members:
        pieces = member.body
        if member.archive != number:
            for line in taking:
                line.end()
            number = member.archive
            reaches = layers
            if member.name == "manifest.json":  # first of all only in archives of our own making
                manifest = b"".join(member.body)
                reaches = len(json.loads(manifest[: member.size])[0]["Layers"])
                pieces = iter([manifest])
            # A node that has all of a part skips it; the last part is the image itself.
            taking = [line for line in alive if reaches > line.known or reaches == layers]
            for line in taking:
                line.begin()
        wanted = [line for line in taking if member.name not in line.leave_out]
        left = wanted
        for piece in chain([member.head], pieces):
            left = [line for line in left if line.put(piece)]
        lost = [line for line in wanted if line not in left]
        taking = [line for line in taking if line not in lost]
        alive = [line for line in alive if line not in lost]
        if not alive:
            return
    for line in taking:
        line.end()
