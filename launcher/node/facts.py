"""Facts of a node: one small shell script (facts.sh) and a parser that accepts any output."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import NodeUnfit
from launcher.model import rdma
from launcher.model.facts import Interface, MountedAs, NodeFacts, Route
from launcher.model.home import wrong_home
from launcher.node import nvidia
from launcher.node.machine import Machine

DOCKER_ROOT = "/var/lib/docker"  # the script prints its free space
# of /proc/net/tcp and tcp6; 0A: TCP_LISTEN of include/net/tcp_states.h
_LISTENS = re.compile(r"^\d+: [0-9A-F]+:([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} 0A\b", re.ASCII | re.MULTILINE)
_PROXIES = {  # https://docs.docker.com/engine/cli/proxy
    "httpProxy": "HTTP_PROXY",
    "httpsProxy": "HTTPS_PROXY",
    "ftpProxy": "FTP_PROXY",
    "noProxy": "NO_PROXY",
    "allProxy": "ALL_PROXY",
}
_LONGEST_PROXY = 8192  # characters
_TCP = 'grep -h " 0A " /proc/net/tcp /proc/net/tcp6 || cat /proc/net/tcp /proc/net/tcp6'
_ROUTE = re.compile(
    r"(?P<interface>\S+)\s+(?P<destination>[0-9A-F]{8})\s+\S+\s+(?P<flags>[0-9A-F]{4})\s+\d+\s+\d+\s+(?P<metric>\d{1,10})"
    r"\s+(?P<mask>[0-9A-F]{8})\b",
    re.ASCII,
)
# Destination, prefix length, source and its prefix length, gateway, metric, references, uses, flags, interface
_ROUTE6 = re.compile(
    r"(?P<destination>[0-9a-f]{32}) (?P<prefix>[0-9a-f]{2}) [0-9a-f]{32} [0-9a-f]{2} [0-9a-f]{32} "
    r"(?P<metric>[0-9a-f]{8}) [0-9a-f]{8} [0-9a-f]{8} (?P<flags>[0-9a-f]{8}) +(?P<interface>\S+)",
    re.ASCII,
)
_UP, _REJECT = 0x1, 0x200  # RTF_UP, RTF_REJECT
_MEMORY = re.compile(r"^Mem(Total|Available): +(\d{1,15}) kB$", re.ASCII | re.MULTILINE)


@dataclass(frozen=True)
class MachineFacts:
    """Parsed output of the script. Missing values are empty, 0, or -1 for free space and IDs."""

    node: NodeFacts  # without its engine
    docker_disk_free: int  # bytes, in DOCKER_ROOT
    docker_inodes_free: int
    complete: bool  # whether the last line and the user ID arrived


@functools.cache
def script() -> str:
    """Return the script, for `sh -c`."""
    return Path(__file__).with_name("facts.sh").read_text(encoding="utf-8")


def collect(machine: Machine, host: str) -> MachineFacts:
    """Run the script and parse its output. Raises NodeUnfit if it did not run to its end, NodeUnreachable."""
    done = machine.script(script())
    found = parse(done.out, machine.node, host, (done.started + done.first) / 2)
    if not found.complete:
        what = f"its login shell did not run our script (exit code {done.code}): {done.message[-300:]}"
        raise NodeUnfit(machine.node, what, f"`echo 'echo works' | {machine.typed('sh -s')}` must print works")
    if wrong := wrong_home(found.node.home):
        where = "" if host == "local" else f" in the login shell's startup file on {host}, such as ~/.profile"
        raise NodeUnfit(machine.node, wrong, f"set it to the user's home folder: export HOME=...{where}")
    return found


def parse(output: bytes, name: str = "", host: str = "", now: float = 0.0) -> MachineFacts:
    """Parse the script's output. Other output of a login shell, truncated and malicious text are accepted.

    now: this machine's clock when the script read the node's.
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
    memory = {name: 1024 * int(size) for name, size in _MEMORY.findall(sections.get("memory", ""))}
    total, available = memory.get("Total", 0), memory.get("Available", -1)
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
        memory=total,
        shm_size=max(0, _disk(lines("shm"), 1)),
        proxies=_proxies(sections.get("docker_proxies", "")),
        output_root="" if wrong_home(first("output_root")) else first("output_root"),
        output_broken=first("output_broken"),
        output_free=_disk(lines("output_disk"), 3),
        output_inodes=free_inodes(sections.get("output_inodes", "")),
        output_mount=mounted_as(first("output_mount")),
        boot=first("boot"),
        machine=first("machine"),
        clock_offset=float(clock[0]) - now if clock else 0.0,
        interfaces=_interfaces("\n".join(lines("addresses")), routes, _links(lines("links"))),
        routes=routes,
        listening=_listening("\n".join(lines("tcp"))),
        gpus=nvidia.gpus(sections, total, available),
        nvidia=nvidia.facts(sections),
        infiniband="yes" in lines("infiniband"),
        peermem="peermem" in lines("infiniband"),
        dmabuf="dmabuf" in lines("infiniband"),
        rdma=rdma.parse("\n".join(lines("infiniband"))),
        ssh_port=_integer(first("ssh").rpartition(" ")[2], 0),
    )
    complete = "end" in sections and node.uid >= 0
    return MachineFacts(node, _disk(lines("docker_disk"), 3), free_inodes(sections.get("docker_inodes", "")), complete)


def listening(machine: Machine) -> tuple[int, ...]:
    """Return the TCP ports with a listener; none if that cannot be read. Raises NodeUnreachable, NodeUnfit."""
    printed = machine.script(_TCP).out.decode("utf-8", errors="replace")
    return _listening("\n".join(line.strip() for line in printed.splitlines()))


def _listening(tcp: str) -> tuple[int, ...]:
    return tuple(sorted({int(port, 16) for port in _LISTENS.findall(tcp)} - {0}))


def _proxies(text: str) -> tuple[tuple[str, str], ...]:
    """Return the variables that `docker run` sets for the proxies of its configuration, in upper case."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    default = found.get("default") if isinstance(found, dict) else None
    values = default if isinstance(default, dict) else {}
    known = [(variable, values.get(key)) for key, variable in _PROXIES.items()]
    return tuple((name, value) for name, value in known if isinstance(value, str) and 0 < len(value) < _LONGEST_PROXY)


def free_space(df: str) -> int:
    """Return the free bytes from the output of `df -Pk`, -1 if unknown."""
    return _disk(df.splitlines(), 3)


def free_inodes(df: str) -> int:
    """Return the free inodes from `df -Pi`; -1 if unknown, or if the file system does not count them (Btrfs)."""
    lines = [line for line in df.splitlines() if line.strip()]
    cells = lines[-1].split() if len(lines) > 1 else []
    return _integer(cells[3], -1) if len(cells) > 3 and _integer(cells[1], 0) else -1


def mounted_as(line: str) -> MountedAs:
    """Parse the line of /proc/mounts: `server:/home /home nfs4 rw,noexec,vers=4.2 0 0`."""
    cells = line.split()
    return MountedAs(cells[2], "noexec" in cells[3].split(",")) if len(cells) >= 4 else MountedAs()


def _integer(text: str, default: int) -> int:
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else default


def _disk(lines: Sequence[str], column: int) -> int:
    """Return a column of `df -Pk` in bytes: 1 is the size, 3 the free space."""
    cells = lines[-1].split() if len(lines) > 1 else []
    kilobytes = _integer(cells[column], -1) if len(cells) > column else -1
    return kilobytes * 1024 if kilobytes >= 0 else -1


def _links(lines: Iterable[str]) -> dict[tuple[str, str], int]:
    """Return speed (Mb/s) and mtu by interface, from `eth0/speed:10000`; without those that are unknown (-1)."""
    found = [re.fullmatch(r"([\w.@-]{1,15})/(speed|mtu):(\d{1,9})", line, re.ASCII) for line in lines]
    return {(match[1], match[2]): int(match[3]) for match in found if match}


def _interfaces(text: str, routes: Sequence[Route], links: Mapping[tuple[str, str], int]) -> tuple[Interface, ...]:
    """Parse `ip -o addr show up`, or /proc/net/fib_trie and the routes of a node without `ip`."""
    found: dict[str, list[str]] = {}
    listed = re.findall(r"^\d+: +(\S+) +inet6? +(\S+)", text, re.ASCII | re.MULTILINE)
    for name, written in listed or _from_trie(text, routes):
        address, _, prefix = written.partition("/")
        family, longest = (socket.AF_INET6, 128) if ":" in address else (socket.AF_INET, 32)
        with contextlib.suppress(OSError, ValueError):
            socket.inet_pton(family, address)  # 10 times as fast as ipaddress: a node has an address per container
            if (length := _integer(prefix, longest)) <= longest:  # `inet 10.8.0.2 peer 10.8.0.1/24` has no prefix
                found.setdefault(name.partition("@")[0], []).append(f"{address}/{length}")
    return tuple(
        Interface(name, tuple(dict.fromkeys(own)), links.get((name, "speed"), 0), links.get((name, "mtu"), 0))
        for name, own in found.items()
    )


def _from_trie(text: str, routes: Sequence[Route]) -> Iterator[tuple[str, str]]:
    """Yield each `|-- ADDRESS` followed by `/32 host LOCAL`, with the interface of the first route that contains it."""
    known = [(ipaddress.ip_network(route.destination), route.interface) for route in routes]
    networks = [(net, name) for net, name in known if net.version == 4]
    for address in re.findall(r"\|-- ([0-9.]{7,15})\n/32 host LOCAL", text):
        with contextlib.suppress(ValueError):
            ip = ipaddress.IPv4Address(address)
            holders = [(name, f"{ip}/{net.prefixlen}") for net, name in networks if net.prefixlen and ip in net]
            yield from holders[:1]


def _routes(lines: Iterable[str]) -> tuple[Route, ...]:
    """Parse /proc/net/route, whose addresses are hexadecimal in little-endian byte order, and /proc/net/ipv6_route."""
    found = []
    for line in lines:
        if match := _ROUTE6.match(line):
            prefix, flags = int(match["prefix"], 16), int(match["flags"], 16)
            if prefix <= 128 and flags & (_UP | _REJECT) == _UP:
                destination = ipaddress.IPv6Network((int(match["destination"], 16), prefix), strict=False)
                found.append(Route(str(destination), match["interface"], int(match["metric"], 16)))
            continue
        match = _ROUTE.match(line)
        if match and int(match["flags"], 16) & _UP:
            prefix = bin(int(match["mask"], 16)).count("1")
            network = ipaddress.IPv4Network((bytes.fromhex(match["destination"])[::-1], prefix), strict=False)
            found.append(Route(str(network), match["interface"], int(match["metric"])))
    return tuple(found)
