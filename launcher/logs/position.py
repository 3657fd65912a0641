"""Places in a growing file on a node, by byte offset: where its last lines begin, and what it had at a time.

A log stays as the program wrote it, without time stamps in its lines: the entry script notes its size once a second in
a file beside it, its clock, and no image needs a tool for it.
"""

from __future__ import annotations

import bisect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.node.files import Files

PIECE = 1 << 20
FARTHEST = 64 << 20  # bytes: a file may have a hole of any size
_NOTE = re.compile(rb"^(\d{1,18}) (\d{1,18})$", re.MULTILINE)
# Prints how many bytes are before the last $2 lines of the file $1, which may be growing.
_BEFORE_LAST_LINES = f"""
size=$(wc -c 2>/dev/null <"$1") || size=0
from=$((size > {FARTHEST} ? size - {FARTHEST} : 0))
last=$(tail -c "+$((from + 1))" -- "$1" | head -c $((size - from)) | tail -n "$2" | wc -c)
echo " $((size - last))"
"""


def read_from(files: Files, path: str, offset: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """What the file has from `offset` to its end as it is now, or to `stop`, in pieces; nothing where it is missing."""
    end = sys.maxsize if stop is None else stop
    try:
        while offset < end and (piece := files.read(path, offset, min(PIECE, end - offset))):
            yield piece
            if len(piece) < PIECE:  # the end: a file that grows faster than it is read has no other one
                return
            offset += len(piece)
    except FileNotFoundError:
        return


def last_lines(files: Files, path: str, count: int) -> int:
    """The offset from which the file's last `count` lines run (a last line without its end counts)."""
    done = files.run(_BEFORE_LAST_LINES, path, str(count), doing=f"read {path}")
    told = re.search(rb" (\d{1,18})\s*$", done.out)
    return int(told[1]) if told else 0


@dataclass(frozen=True)
class Clock:
    """`times[i]`: seconds since the epoch, on the node, when the log had `sizes[i]` bytes."""

    times: tuple[float, ...]
    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, text: bytes) -> Clock:
        """From the lines `<epoch seconds> <bytes>`; other lines, such as a torn one, are ignored."""
        times: list[float] = []
        sizes: list[int] = []
        for note in _NOTE.finditer(text):
            time, size = float(note[1]), int(note[2])
            if not sizes or size >= sizes[-1]:
                times.append(time)
                sizes.append(size)
        return cls(tuple(times), tuple(sizes))

    def time_of(self, offset: int) -> float | None:
        """The latest time by which the byte at `offset` was written; None after the last note."""
        place = bisect.bisect_right(self.sizes, offset)
        return self.times[place] if place < len(self.times) else None

    def offset_at(self, time: float) -> int:
        """The log's size at `time`: what follows was written then or later, to within a second."""
        place = bisect.bisect_left(self.times, time)
        return self.sizes[place - 1] if place > 0 else 0
