"""One stream of bytes to several readers, each at its own pace within a bounded distance of the writer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

ROOM = 32 << 20  # bytes that a reader may lag behind: enough to ride out a pause, nothing beside an image


class Pipe:
    """From one writing thread to one reading thread. Iterate it once to read; `failed` is raised there in its place."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._held = 0
        self._pieces: deque[bytes] = deque()
        self._closed = False
        self._gone = False
        self._error: BaseException | None = None
        self._change = threading.Condition()

    def put(self, piece: bytes) -> bool:
        """Wait for room, then hand over; False when nobody reads any more."""
        with self._change:
            self._change.wait_for(lambda: self._gone or self._held < self._room)
            if self._gone:
                return False
            self._pieces.append(piece)
            self._held += len(piece)
            self._change.notify_all()
            return True

    def close(self, error: BaseException | None = None) -> None:
        """No more pieces; with `error`, the reader gets it raised instead of the end."""
        with self._change:
            self._closed, self._error = True, error
            self._change.notify_all()

    def give_up(self) -> None:
        """The reader's side: nothing will be read any more; frees a writer that waits."""
        with self._change:
            self._gone = True
            self._pieces.clear()
            self._change.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._pieces or self._closed)
                if not self._pieces:
                    if self._error is not None:
                        raise self._error
                    return
                piece = self._pieces.popleft()
                self._held -= len(piece)
                self._change.notify_all()
            yield piece
