"""How a job file names machines: hosts as ssh takes them, and the short names that follow from them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from launcher.job.problems import BadValueError, show

if TYPE_CHECKING:
    from launcher.job.models import NodeEntry

LOCAL = "local"

# Nothing that ssh could take for an option, nothing that a label or a file name would have to escape.
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
    """What two entries must not share: the host's name and its port ("" where ssh's own configuration has it)."""
    found = _HOST.fullmatch(host)
    return (found["host"].lower(), found["port"] or "") if found else (host, "")


def names_of(hosts: Sequence[str]) -> list[str]:
    """The default name of each: local-0, local-1 where `local` repeats; else without user, and port if need be."""
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


def with_names(nodes: tuple[NodeEntry, ...]) -> tuple[NodeEntry, ...]:
    """The entries, each with its own name or its default one. Raises BadValueError where there are none."""
    if not nodes:
        raise BadValueError("an empty list; expected one node or more")
    return tuple(
        node if node.name else node.model_copy(update={"name": name})
        for node, name in zip(nodes, names_of([node.host for node in nodes]), strict=True)
    )
