"""When a byte of a log was written: the entry script notes the log's size once a second; this reads its notes.

The log itself stays as the program wrote it, without time stamps in its lines, and no image needs a tool for it.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass


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
        for line in text.split(b"\n"):
            words = line.split()
            if len(words) != 2 or not (words[0].isdigit() and words[1].isdigit()) or len(line) > 40:
                continue
            time, size = float(words[0]), int(words[1])
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
