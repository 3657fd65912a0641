"""Versions of programs, to compare."""

from __future__ import annotations

import re


def version_numbers(version: str) -> tuple[int, ...]:
    """Return (1, 19, 0) for `1.19.0-1`; () if it does not begin with a number."""
    found = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(map(int, found[0].split("."))) if found else ()
