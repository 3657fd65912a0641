"""What a node is: one small shell script (facts.sh) and a parser that no output of it can break."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import NodeUnfit
from launcher.model.facts import Interface, NodeFacts, Route
from launcher.model.home import wrong_home
from launcher.node import nvidia
from launcher.node.machine import Machine, run_script

DOCKER_ROOT = "/var/lib/docker"  # whose free space the script tells
# of /proc/net/tcp and tcp6; 0A: TCP_LISTEN of include/net/tcp_states.h
_LISTENS = re.compile(r"^\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} 0A\b", re.ASCII | re.MULTILINE)
_ROUTE = re.compile(
    r"(?P<interface>\S+)\s+(?P<destination>[0-9A-F]{8})\s+\S+\s+(?P<flags>[0-9A-F]{4})\s+\d+\s+\d+\s+(?P<metric>\d{1,10})"
    r"\s+(?P<mask>[0-9A-F]{8})\b",
    re.ASCII,
)


@dataclass(frozen=True)
class Look:
    """What the script told. What it did not tell is empty, 0, or -1 for free space and ids."""

    node: NodeFacts  # without its engine
    docker_disk_free: int  # bytes, below DOCKER_ROOT
    complete: bool  # its last line arrived, and which user it is


@functools.cache
def script() -> str:
    """To be run by `sh -c`."""
    return Path(__file__).with_name("facts.sh").read_text(encoding="utf-8")


def look(machine: Machine, host: str) -> Look:
    """Raises NodeUnfit when the script did not run to its end, NodeUnreachable."""
    done = run_script(machine, script())
    found = parse(done.out, machine.node, host, (done.started + done.first) / 2)
    if not found.complete:
        what = f"its shell does not run our script (exit code {done.code}): {done.complaint[-300:]}"
        shell = "sh -s" if host == "local" else f"ssh {host} sh -s"
        raise NodeUnfit(machine.node, what, f"`echo 'echo works' | {shell}` must print works")
    if wrong := wrong_home(found.node.home):
        where = "" if host == "local" else f" on {host}, where its shell starts (~/.profile or the like)"
        raise NodeUnfit(machine.node, wrong, f"set it to the user's home folder: export HOME=...{where}")
    return found


def parse(output: bytes, name: str = "", host: str = "", now: float = 0.0) -> Look:
    """Read the script's output; a login shell's own output before it, torn and hostile text are no reason to fail.

    now: the caller's clock when the script read the node's.
    """
    pieces = re.split(r"^@@(.*)$", output.decode("utf-8", errors="replace"), flags=re.MULTILINE)
    sections = {name.strip(): body for name, body in zip(pieces[1::2], pieces[2::2], strict=True)}

    def lines(section: str) -> list[str]:
        return [line.strip() for line in sections.get(section, "").splitlines() if line.strip()]

    def first(section: str) -> str:
        return next(iter(lines(section)), "")

    user, uid, gid, groups = (*lines("user"), "", "", "", "")[:4]
    hostname, arch = (*lines("host"), "", "")[:2]
    routes = _routes(lines("routes"))
    clock = re.match(r"\d{1,15}(\.\d{1,9})?", first("time"), re.ASCII)  # busybox prints no fraction, or "%N"
    node = NodeFacts(
        name=name,
        host=host,
        hostname=hostname,
        arch=arch,
        user=user,
        uid=_integer(uid, -1),
        gid=_integer(gid, -1),
        groups=tuple(number for word in groups.split() if (number := _integer(word, -1)) >= 0),
        home=first("home"),
        cpus=_integer(first("cpus"), 0),
        memory=_integer((*first("memory").split(), "", "")[1], 0) * 1024,  # MemTotal: 527942812 kB
        shm_size=max(0, _disk(lines("shm"), 1)),
        clock_offset=float(clock[0]) - now if clock else 0.0,
        interfaces=_interfaces("\n".join(lines("addresses")), routes),
        routes=routes,
        listening=tuple(sorted({int(port, 16) for port in _LISTENS.findall("\n".join(lines("tcp")))} - {0})),
        gpus=nvidia.gpus(sections),
        nvidia=nvidia.facts(sections),
        infiniband="yes" in lines("infiniband"),
        ssh_port=_integer(first("ssh").rpartition(" ")[2], 0),
    )
    complete = "end" in sections and node.uid >= 0
    return Look(node, _disk(lines("docker_disk"), 3), complete)


def free_space(df: bytes) -> int:
    """Bytes free by the output of `df -Pk`, -1 where it does not tell."""
    return _disk(df.decode("utf-8", errors="replace").splitlines(), 3)


def _integer(text: str, default: int) -> int:
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else default


def _disk(lines: Sequence[str], column: int) -> int:
    """A column of `df -Pk` in bytes: 1 is the size, 3 what is free."""
    words = lines[-1].split() if len(lines) > 1 else []
    kilobytes = _integer(words[column], -1) if len(words) > column else -1
    return kilobytes * 1024 if kilobytes >= 0 else -1


def _interfaces(text: str, routes: Sequence[Route]) -> tuple[Interface, ...]:
    """From `ip -o addr show up`; on a node without `ip` from /proc/net/fib_trie and the routes."""
    found: dict[str, list[str]] = {}
    told = re.findall(r"^\d+: +(\S+) +inet6? +(\S+)", text, re.ASCII | re.MULTILINE)
    for name, written in told or _from_trie(text, routes):
        address, _, prefix = written.partition("/")
        family, longest = (socket.AF_INET6, 128) if ":" in address else (socket.AF_INET, 32)
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, address)  # a tenth of the time of ipaddress: a node has an address a container
            if (length := _integer(prefix, longest)) <= longest:  # `inet 10.8.0.2 peer 10.8.0.1/24` has no prefix
                found.setdefault(name.partition("@")[0], []).append(f"{address}/{length}")
    return tuple(Interface(name, tuple(dict.fromkeys(addresses))) for name, addresses in found.items())


def _from_trie(text: str, routes: Sequence[Route]) -> Iterator[tuple[str, str]]:
    """Each `|-- ADDRESS` that `/32 host LOCAL` follows, behind the interface of the first route that holds it."""
    networks = [(ipaddress.IPv4Network(route.destination), route.interface) for route in routes]
    for address in re.findall(r"\|-- ([0-9.]{7,15})\n/32 host LOCAL", text):
        with contextlib.suppress(ValueError):
            ip = ipaddress.IPv4Address(address)
            holders = [(name, f"{ip}/{net.prefixlen}") for net, name in networks if net.prefixlen and ip in net]
            yield from holders[:1]


def _routes(lines: Iterable[str]) -> tuple[Route, ...]:
    """From /proc/net/route: addresses are hexadecimal, in the byte order of a little-endian machine."""
    found = []
    for line in lines:
        match = _ROUTE.match(line)
        if match and int(match["flags"], 16) & 1:  # RTF_UP
            prefix = bin(int(match["mask"], 16)).count("1")
            network = ipaddress.IPv4Network((bytes.fromhex(match["destination"])[::-1], prefix), strict=False)
            found.append(Route(str(network), match["interface"], int(match["metric"])))
    return tuple(found)
