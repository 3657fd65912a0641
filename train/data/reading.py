"""Reads in progress in this process, to report one that does not return, for example on a lost network file system."""

from __future__ import annotations

import threading
import time

from train.data.source import Pixels, Source

_begun: dict[int, tuple[float, Source, int]] = {}  # thread -> start time, source, index


def read(source: Source, index: int) -> bytes | Pixels:
    """Read an item. Raises OSError like its source."""
    thread = threading.get_ident()
    _begun[thread] = (time.monotonic(), source, index)
    try:
        return source.read(index)
    finally:
        del _begun[thread]


def longest() -> tuple[str, float] | None:
    """Return the item with the longest read in progress, and its seconds; None if there is none."""
    if not (begun := list(_begun.values())):
        return None
    since, source, index = min(begun, key=lambda entry: entry[0])
    return source.name(index), time.monotonic() - since
