"""What a node is: one small shell script (facts.sh) and a parser that no output of it can break."""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from launcher.errors import NodeUnfit
from launcher.model.facts import Gpu, Interface, NodeFacts, Route
from launcher.node.machine import Machine, run_script

DOCKER_ROOT = "/var/lib/docker"  # whose free space the script tells
# of /proc/net/tcp and tcp6; 0A: TCP_LISTEN of include/net/tcp_states.h
_LISTENS = re.compile(r"^\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} 0A\b", re.ASCII | re.MULTILINE)
_MAX_DIGITS = 25  # longer is no number of a machine, and slow to convert


@dataclass(frozen=True)
class Look:
    """What the script told. What it did not tell is empty, 0, or -1 for free space and ids."""

    node: NodeFacts  # without its engine
    docker_disk_free: int  # bytes, below DOCKER_ROOT
    complete: bool  # its last line arrived, and who the user is


@functools.cache
def script() -> str:
    """To be run by `sh -c`."""
    return Path(__file__).with_name("facts.sh").read_text(encoding="utf-8")


def look(machine: Machine, host: str) -> Look:
    """Raises NodeUnfit when the script did not run to its end, NodeUnreachable."""
    done = run_script(machine, script())
    found = parse(done.out, machine.node, host, (done.started + done.first) / 2)
    if not found.complete:
        raise NodeUnfit(
            machine.node,
            f"its shell does not run our script (exit code {done.code}): {done.complaint[-300:]}",
            f"`echo 'echo works' | {'sh -s' if host == 'local' else f'ssh {host} sh -s'}` must print works",
        )
    return found


def parse(output: bytes, name: str = "", host: str = "", now: float = 0.0) -> Look:
    """Read the script's output; a login shell's own output before it, torn and hostile text are no reason to fail.

    now: the caller's clock when the script read the node's.
    """
    sections = _sections(output.decode("utf-8", errors="replace"))

    def lines(section: str) -> list[str]:
        return sections.get(section, [])

    user, uid, gid, groups = (*lines("user"), "", "", "", "")[:4]
    hostname, arch = (*lines("host"), "", "")[:2]
    routes, clock = _routes(lines("routes")), _time(lines("time"))
    node = NodeFacts(
        name=name,
        host=host,
        hostname=hostname,
        arch=arch,
        user=user,
        uid=_integer(uid, -1),
        gid=_integer(gid, -1),
        groups=tuple(number for word in groups.split() if (number := _integer(word, -1)) >= 0),
        home=_first(lines("home")),
        cpus=_integer(_first(lines("cpus")), 0),
        memory=_memory(lines("memory")),
        shm_size=max(0, _disk(lines("shm"), 1)),
        clock_offset=clock - now if clock else 0.0,
        interfaces=_interfaces(lines("addresses"), routes),
        routes=routes,
        listening=_listening(lines("tcp")),
        gpus=_gpus(lines("gpus")),
        infiniband="yes" in lines("infiniband"),
        ssh_port=_integer((*_first(lines("ssh")).split(), "", "", "", "")[3], 0),
    )
    complete = "end" in sections and node.uid >= 0 and bool(node.home)
    return Look(node, _disk(lines("docker_disk"), 3), complete)


def free_space(df: bytes) -> int:
    """Bytes free by the output of `df -Pk`, -1 where it does not tell."""
    return _disk(df.decode("utf-8", errors="replace").splitlines(), 3)


def _sections(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in map(str.strip, text.splitlines()):
        if line.startswith("@@"):
            current = found.setdefault(line[2:].strip(), [])
        elif current is not None and line:
            current.append(line)
    return found


def _first(lines: Sequence[str]) -> str:
    return lines[0] if lines else ""


def _integer(text: str, default: int, base: int = 10) -> int:
    if not text.isascii() or not text.isalnum() or len(text) > _MAX_DIGITS:
        return default
    try:
        return int(text, base)
    except ValueError:
        return default


def _time(lines: Sequence[str]) -> float:
    match = re.fullmatch(r"(\d{1,15})(\.\d{1,9})?.*", _first(lines), re.ASCII)  # busybox prints no fraction, or "%N"
    return float(match.group(1)) + float(match.group(2) or 0) if match else 0.0


def _memory(lines: Iterable[str]) -> int:
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == "MemTotal:":
            return _integer(words[1], 0) * 1024
    return 0


def _disk(lines: Sequence[str], column: int) -> int:
    """A column of `df -Pk` in bytes: 1 is the size, 3 what is free."""
    words = lines[-1].split() if len(lines) > 1 else []
    kilobytes = _integer(words[column], -1) if len(words) > column else -1
    return kilobytes * 1024 if kilobytes >= 0 else -1


def _interfaces(lines: Sequence[str], routes: Sequence[Route]) -> tuple[Interface, ...]:
    """From `ip -o addr show up`; on a node without `ip` from /proc/net/fib_trie and the routes."""
    found: dict[str, list[str]] = {}
    for line in lines:
        words = line.split()
        if len(words) >= 4 and words[2] in ("inet", "inet6") and re.fullmatch(r"\d+:", words[0], re.ASCII):
            # a point-to-point link: `inet 10.8.0.2 peer 10.8.0.1/24`
            address = words[3] if "/" in words[3] or "peer" not in words else f"{words[3]}/32"
            if _is_address(address):
                found.setdefault(words[1].partition("@")[0], []).append(address)
    if not found and any("LOCAL" in line for line in lines):
        found = _from_trie(lines, routes)
    return tuple(Interface(name, tuple(dict.fromkeys(addresses))) for name, addresses in found.items())


def _from_trie(lines: Sequence[str], routes: Sequence[Route]) -> dict[str, list[str]]:
    """`|-- ADDRESS` lines that `/32 host LOCAL` follows, with the interface of the route that holds them."""
    found: dict[str, list[str]] = {}
    for line, after in pairwise(lines):
        match = re.fullmatch(r"\|-- ([0-9.]{7,15})", line)
        if match is None or "host LOCAL" not in after or not _is_address(match.group(1)):
            continue
        address = ipaddress.ip_address(match.group(1))
        for route in routes:
            network = ipaddress.ip_network(route.destination)
            if network.prefixlen and address in network:
                found.setdefault(route.interface, []).append(f"{address}/{network.prefixlen}")
                break
    return found


def _is_address(text: str) -> bool:
    address, _, prefix = text.partition("/")
    family, longest = (socket.AF_INET6, 128) if ":" in address else (socket.AF_INET, 32)
    try:
        socket.inet_pton(family, address)
    except (OSError, ValueError):
        return False
    return not prefix or 0 <= _integer(prefix, -1) <= longest


def _routes(lines: Iterable[str]) -> tuple[Route, ...]:
    """From /proc/net/route: addresses are hexadecimal, in the byte order of a little-endian machine."""
    found = []
    for line in lines:
        words = line.split()
        if len(words) < 8 or len(words[1]) != 8 or len(words[7]) != 8:
            continue
        destination, flags, mask = (_integer(words[place], -1, 16) for place in (1, 3, 7))
        if min(destination, flags, mask) < 0 or not flags & 1:  # RTF_UP
            continue
        numbers = [int.from_bytes(value.to_bytes(4, "little"), "big") for value in (destination, mask)]
        prefix = bin(numbers[1]).count("1")
        network = ipaddress.ip_network((numbers[0], prefix), strict=False)
        found.append(Route(str(network), words[0], _integer(words[6], 0)))
    return tuple(found)


def _listening(lines: Iterable[str]) -> tuple[int, ...]:
    ports = {int(port, 16) for port in _LISTENS.findall("\n".join(lines))}
    return tuple(sorted(ports - {0}))


def _gpus(lines: Iterable[str]) -> tuple[Gpu, ...]:
    """From nvidia-smi's csv; other lines (an error, a warning) are ignored."""
    found = []
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 5 or not cells[1].startswith(("GPU-", "MIG-")):
            continue
        index = _integer(cells[0], -1)
        if index >= 0:
            found.append(Gpu(index, cells[1], cells[2], max(0, _integer(cells[3], 0)), cells[4]))
    return tuple(found)
