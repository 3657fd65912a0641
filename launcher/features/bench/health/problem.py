"""A hardware problem of one component of a machine, described for users."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class HealthProblem:
    """node: its name in the job; part: "GPU 3", "link eth0", "InfiniBand mlx5_0/1"; what: the problem."""

    node: str
    part: str
    what: str
    fix: str


def plain(text: str, limit: int = 40) -> str:
    """Return text from a machine without control characters, safe for a terminal."""
    return re.sub(r"[^ -~]", "?", text)[:limit]


def number(text: str) -> int:
    """Return the number at the start of "16x", "1980 MHz" or "445.38 W"; 0 for "N/A" and other text."""
    match = re.match(r"\s*(\d{1,12})", text, re.ASCII)
    return int(match[1]) if match else 0
