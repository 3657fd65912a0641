"""Sizes in bytes, and numbers of things, as text."""

from __future__ import annotations


def size_text(size: float) -> str:
    """Return a size in bytes for a message: `512 B`, `3 kB`, `1.2 GB` (1 kB = 1,000 B)."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.1f}".removesuffix(".0") + f" {units[0]}"


def counted(number: int, what: str) -> str:
    """Return `1 worker`, `2 workers`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
