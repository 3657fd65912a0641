"""What is wrong with one part of a machine, in words for a person."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Trouble:
    """node: its name in the job; part: "GPU 3", "link eth0", "InfiniBand mlx5_0/1"; what: the cause."""

    node: str
    part: str
    what: str
    fix: str


def plain(text: str, limit: int = 40) -> str:
    """Text of a machine for a terminal: without control characters."""
    return re.sub(r"[^ -~]", "?", text)[:limit]


def number(text: str) -> int:
    """The number at the start of "16x", "1980 MHz", "445.38 W"; 0 for "N/A" and other words."""
    match = re.match(r"\s*(\d{1,12})", text, re.ASCII)
    return int(match[1]) if match else 0
