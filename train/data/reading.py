"""Reads that are under way in this process, so that one that does not return, as on a lost network disk, is named."""

from __future__ import annotations

import threading
import time

from train.data.source import Pixels, Source

_begun: dict[int, tuple[float, Source, int]] = {}  # thread -> since when, and what


def read(source: Source, index: int) -> bytes | Pixels:
    """The item. Raises OSError, as its source does."""
    thread = threading.get_ident()
    _begun[thread] = (time.monotonic(), source, index)
    try:
        return source.read(index)
    finally:
        del _begun[thread]


def longest() -> tuple[str, float] | None:
    """The item that has been read for the longest time, and the seconds; None if nothing is being read."""
    if not (begun := list(_begun.values())):
        return None
    since, source, index = min(begun, key=lambda entry: entry[0])
    return source.name(index), time.monotonic() - since
