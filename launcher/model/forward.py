"""A port of this machine that leads to one of a node, as in `ssh -L`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.errors import UsageError

_FORWARD = re.compile(r"(?:([0-9]{1,5}):)?([0-9]{1,5})")


@dataclass(frozen=True)
class Forward:
    """From 127.0.0.1:local here to 127.0.0.1:remote on the node."""

    local: int
    remote: int

    @property
    def option(self) -> str:
        """The value of ssh's -L, for this machine alone. With `localhost` ssh takes ::1 where 127.0.0.1 is in use."""
        return f"127.0.0.1:{self.local}:127.0.0.1:{self.remote}"


def parse_forward(text: str) -> Forward:
    """`8888`, or `9000:8888` where the port here is another one. Raises UsageError."""
    found = _FORWARD.fullmatch(text)
    ports = [int(port) for port in found.groups(found[2])] if found else []
    if not ports or not all(0 < port < 65536 for port in ports):
        raise UsageError(f"-L {text}", "is neither PORT nor LOCAL:PORT, each from 1 to 65535", "such as -L 8888")
    return Forward(*ports)
