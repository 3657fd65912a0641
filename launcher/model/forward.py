"""Forwarding of a local port to a port of a node, as in `ssh -L`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.errors import UsageError

_FORWARD = re.compile(r"(?:([0-9]{1,5}):)?([0-9]{1,5})")


@dataclass(frozen=True)
class Forward:
    """From 127.0.0.1:local on this machine to 127.0.0.1:remote on the node."""

    local: int
    remote: int


def parse_forward(text: str) -> Forward:
    """Parse `8888`, or `9000:8888` with a different local port. Raises UsageError."""
    found = _FORWARD.fullmatch(text)
    ports = [int(port) for port in found.groups(found[2])] if found else []
    if not ports or not all(0 < port < 65536 for port in ports):
        raise UsageError(f"-L {text}", "expected PORT or LOCAL:PORT, each from 1 to 65535", "example: -L 8888")
    return Forward(*ports)
