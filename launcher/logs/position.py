"""Byte offsets in a growing file on a node: of its last lines, and of its end at a given time.

A log stays as the program wrote it, without time stamps in its lines: once a second the entry script appends its size
to a second file, the clock. No image needs a tool for this.
"""

from __future__ import annotations

import bisect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.node.files import Files

PIECE = 1 << 20
FARTHEST = 64 << 20  # bytes to search: a sparse file may have a hole of any size
_NOTE = re.compile(rb"^(\d{1,18}) (\d{1,18})$", re.MULTILINE)


def read_from(files: Files, path: str, offset: int = 0, stop: int | None = None, *, below: str) -> Iterator[bytes]:
    """Yield the file from `offset` to its current end, or to `stop`, in pieces; nothing if it does not exist.

    below: the output folder that contains it.
    """
    end = sys.maxsize if stop is None else stop
    try:
        while offset < end and (piece := files.read(path, offset, min(PIECE, end - offset), below=below)):
            yield piece
            if len(piece) < PIECE:  # the current end: a file may grow faster than it is read
                return
            offset += len(piece)
    except FileNotFoundError:
        return


def last_lines(files: Files, path: str, count: int, *, below: str) -> int:
    """Return the offset of the file's last `count` lines (an incomplete last line counts); 0 if it does not exist.

    below: the output folder that contains it.
    """
    try:
        return files.before_last_lines(path, count, FARTHEST, below=below)
    except FileNotFoundError:
        return 0


@dataclass(frozen=True)
class Clock:
    """`times[i]`: seconds since the epoch, on the node, when the log had `sizes[i]` bytes."""

    times: tuple[float, ...]
    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, text: bytes) -> Clock:
        """Parse the lines `<epoch seconds> <bytes>`; other lines, such as a truncated one, are ignored."""
        times: list[float] = []
        sizes: list[int] = []
        for note in _NOTE.finditer(text):
            time, size = float(note[1]), int(note[2])
            if not sizes or size >= sizes[-1]:
                times.append(time)
                sizes.append(size)
        return cls(tuple(times), tuple(sizes))

    def time_of(self, offset: int) -> float | None:
        """Return the latest time by which the byte at `offset` was written; None after the last note."""
        index = bisect.bisect_right(self.sizes, offset)
        return self.times[index] if index < len(self.times) else None

    def offset_at(self, time: float) -> int:
        """Return the log's size at `time`: later bytes were written then or later, to within a second."""
        index = bisect.bisect_left(self.times, time)
        return self.sizes[index - 1] if index > 0 else 0
