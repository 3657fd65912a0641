"""How a job file names machines: hosts as ssh takes them, and the short names that follow from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from launcher.job.problems import BadValueError, show

LOCAL = "local"

# Nothing that ssh would parse as an option, nothing that needs escaping in a label or a file name.
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.+-]*)@)?"
    r"(?P<host>[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
    r"(?::(?P<port>[0-9]{1,5}))?"
)


def parse_host(value: Any) -> str:
    """An ssh config alias, user@host:port, or `local`. Raises BadValueError."""
    if not isinstance(value, str):
        quote = "; write it in quotes" if isinstance(value, (int, float)) else ""
        raise BadValueError(f"expected an ssh alias, user@host:port or local, not {show(value)}{quote}")
    found = _HOST.fullmatch(value) if len(value) <= 300 else None
    if not found:
        hint = "; write an IPv6 address in brackets" if value.count(":") > 1 else ""
        raise BadValueError(f"expected an ssh alias, user@host:port or local, not {show(value)}{hint}")
    if found["port"] and not 1 <= int(found["port"]) <= 65535:
        raise BadValueError(f"expected a port from 1 to 65535 in {show(value)}")
    return str(value)


def machine(host: str) -> tuple[str, str]:
    """Host name and port, which identify a machine; port "" means the one of the ssh configuration."""
    found = _HOST.fullmatch(host)
    return (found["host"].lower(), found["port"] or "") if found else (host, "")


def names_of(hosts: Sequence[str]) -> list[str]:
    """Default names: the host without user, with the port only if hosts repeat; local-0, local-1 if `local` does."""
    bare = Counter(machine(host)[0] for host in hosts)
    names: list[str] = []
    locals_seen = 0
    for host in hosts:
        name, port = machine(host)
        if host == LOCAL and bare[LOCAL] > 1:
            names.append(f"{LOCAL}-{locals_seen}")
            locals_seen += 1
            continue
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", name.strip("[]")).lstrip("-._") or "node"
        names.append((f"{plain}-{port}" if bare[name] > 1 and port else plain)[:63])
    return names
