"""Forwarding of a local port to a port of a node, as in `ssh -L`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.errors import UsageError

_FORWARD = re.compile(r"(?:(?P<local>[0-9]{1,5}):)?(?P<remote>[0-9]{1,5})")
_PORTS = range(1, 65536)


@dataclass(frozen=True)
class Forward:
    """From 127.0.0.1:local on this machine to 127.0.0.1:remote on the node."""

    local: int
    remote: int


def parse_forward(text: str) -> Forward:
    """Parse `8888`, or `9000:8888` with a different local port. Raises UsageError."""
    if found := _FORWARD.fullmatch(text):
        remote = int(found["remote"])
        local = int(found["local"] or remote)
        if local in _PORTS and remote in _PORTS:
            return Forward(local, remote)
    raise UsageError(f"-L {text}", "expected PORT or LOCAL:PORT, each from 1 to 65535", "example: -L 8888")
