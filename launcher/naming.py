"""Names in a message: the first of many."""

from __future__ import annotations

from collections.abc import Sequence


def first_of(names: Sequence[str], most: int) -> str:
    """Return `a, b, c and 4 more`: at most so many names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
