"""Reads in progress in this process, to report one that does not return, for example on a lost network file system."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from train.data.source import Data, Pixels, Place, Source


class Progress(ctypes.Structure):
    """Which of a thread's items is being read, and since when in seconds of time.monotonic(); as in roi.c."""

    _fields_ = [("since", ctypes.c_double), ("at", ctypes.c_int)]


# reads items, as Library.read
Read = Callable[[Sequence[Place], Progress], Sequence[memoryview | OSError | None]]
_begun: dict[int, tuple[Source, Sequence[int], Progress]] = {}  # by thread


@contextmanager
def _reading(source: Source, indices: Sequence[int]) -> Iterator[Progress]:
    thread, progress = threading.get_ident(), Progress(time.monotonic(), 0)
    _begun[thread] = source, indices, progress
    try:
        yield progress
    finally:
        del _begun[thread]


def read(source: Source, index: int) -> bytes | Pixels:
    """Read an item. Raises OSError like its source."""
    with _reading(source, (index,)):
        return source.read(index)


def read_many(source: Source, indices: Sequence[int], at_once: Read | None) -> Iterator[Data | Pixels | OSError]:
    """Yield items, or why they cannot be read. Those before the last are valid until this thread reads again.

    `at_once`: reads several items with one call, without the GIL.
    """
    places = [source.place(index) for index in indices] if at_once else []
    found: Sequence[memoryview | OSError | None] = [None] * len(indices)
    if at_once and all(places):
        with _reading(source, indices) as progress:
            found = at_once([place for place in places if place], progress)
    for index, item in zip(indices, found, strict=True):
        if item is not None:
            yield item
            continue
        try:
            yield read(source, index)
        except OSError as error:
            yield error


def longest() -> tuple[str, float] | None:
    """Return the item with the longest read in progress, and its seconds; None if there is none."""
    if not (begun := list(_begun.values())):
        return None
    source, indices, progress = min(begun, key=lambda entry: entry[2].since)
    return source.name(indices[progress.at]), time.monotonic() - progress.since
