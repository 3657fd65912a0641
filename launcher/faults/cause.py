"""The value that every rule of this folder yields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """What a fault means, and its fix; "" if the fix is not known."""

    what: str
    fix: str = ""
