"""From 2 to 256 nodes, what a user calls: start, the end of a run and `down`, beside ssh to all nodes at once.

    pip install -e '.[bench]' && python -m bench.fanout [--nodes 2 16 64 128 256] [--repeat 3] [--json FILE]

- start: `launcher up -d`, from the call to its return. Beside it: `ssh NODE docker run`.
- end: an attached `launcher up`, from the end of the last container to its exit; by then it has the files of every node
  (four, 20 kB). Beside it: `ssh NODE cat FILES`.
- down: `launcher down` of a running job: containers stopped, files brought here, containers removed. Beside it:
  `ssh NODE docker rm`.

The nodes are pretended (bench/programs/fanout_nodes.py): an ssh server each, a round trip of 50 ms away, in processes
of their own, whose processor time is not counted though it is taken from the same cores. The launcher does all that it
does on real nodes; ssh's commands are answered at once, and only `cat` does anything. The two take turns; a ratio is
the median of the turns' own ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench import report
from bench.environment import Caller, Cost, ssh_to_all
from bench.programs.fanout_engine import IMAGE, SECONDS

ROUND_TRIP_MS = 50
PROCESSES = 4  # for the pretended nodes
START, END, DOWN = "start", "end", "down"
ALL = "all three"
COMMANDS = {START: f"docker run -d {IMAGE} true", END: "cat job", DOWN: "docker rm -f any"}
RATIO_NODES, RATIO_TARGET = 128, 1.0  # of ssh, each of the three
WALL_NODES, WALL_TARGET = 64, 3.0  # seconds, end and down
MEMORY_TARGET = 300.0  # MiB
GROWTH_TARGET = 6.0  # times, from the fewest nodes to the most

Turn = dict[str, Cost]  # by START, END, DOWN


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fanout", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 16, 64, 128, 256])
    parser.add_argument("--repeat", type=int, default=3, help="turns of each, after one of ours that is not counted")
    parser.add_argument("--json", type=Path, metavar="FILE")
    call = parser.parse_args()
    machine = report.machine()
    found: dict[int, dict[str, list[Turn]]] = {}
    for count in call.nodes:
        found[count] = measure(count, call.repeat)
    machine["load_after"] = round(os.getloadavg()[0], 2)
    print()
    print(report.table(_rows(found)))
    print()
    print("\n".join(_verdicts(found)))
    if call.json:
        results = [
            {
                "nodes": count,
                "way": way,
                "turns": [{what: asdict(cost) for what, cost in turn.items()} for turn in turns],
            }
            for count, ways in found.items()
            for way, turns in ways.items()
        ]
        report.write(call.json, {"machine": machine, "round_trip_ms": ROUND_TRIP_MS, "results": results})
    return 0


def measure(count: int, repeat: int) -> dict[str, list[Turn]]:
    """Both ways with so many nodes."""
    found: dict[str, list[Turn]] = {"launcher": [], "ssh": []}
    hosts = [f"node{place + 1}" for place in range(count)]
    with (
        pretended(count) as config,
        tempfile.TemporaryDirectory(prefix="bench-cache-") as cache,
        Caller.at(config, XDG_CACHE_HOME=cache) as caller,
    ):
        ways = {"launcher": lambda: _launcher(caller, hosts), "ssh": lambda: _ssh(config, hosts)}
        ways["launcher"]()  # what it remembers of engines and images it has then
        for turn in range(repeat):
            for name in sorted(ways, reverse=bool(turn % 2)):
                costs = ways[name]()
                found[name].append(costs)
                figures = "  ".join(f"{what} {cost.wall:.2f} s" for what, cost in costs.items())
                print(f"{count:4} {name:8} {figures}", flush=True)
    return found


def _launcher(caller: Caller, hosts: Sequence[str]) -> Turn:
    # One address for all, as this machine has it: that the others reach the first node is tried as ever.
    nodes = [{"host": host, "address": "127.0.0.1"} for host in hosts]

    def job(name: str, seconds: float) -> str:
        env = {SECONDS: f"{seconds:g}"}
        return caller.job(name, nodes, {"command": ["true"]}, image={"ref": IMAGE}, env=env)

    costs = {START: caller.launcher("up", "-d", job("bench-long", 3600)), DOWN: caller.launcher("down")}
    caller.forget()
    whole = caller.launcher("up", job("bench-short", 3 + len(hosts) / 25))  # long enough for all of them to be followed
    costs[END] = Cost(caller.seconds_since_end(), whole.processor, whole.memory)
    [run] = caller.folder.glob("runs/*")
    brought = len(list(run.glob("logs/*.log"))) - len(hosts)  # besides a log of every node: one of every rank
    if brought != len(hosts):
        raise RuntimeError(f"the files of {brought} nodes are here, not of {len(hosts)}")
    caller.down()
    return {what: costs[what] for what in COMMANDS}


def _ssh(config: Path, hosts: Sequence[str]) -> Turn:
    return {what: ssh_to_all(config, hosts, command) for what, command in COMMANDS.items()}


@contextlib.contextmanager
def pretended(count: int) -> Iterator[Path]:
    """So many nodes; an ssh config that knows them as node1, node2, ..."""
    with tempfile.TemporaryDirectory(prefix="bench-nodes-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "bin").mkdir()
        (folder / "bin" / "docker").write_text("#!/bin/sh\n")
        (folder / "bin" / "docker").chmod(0o755)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        ports: list[int] = []
        real: Counter[str] = Counter()
        stack.callback(_tell, real)
        servers = min(PROCESSES, count)
        for place in range(servers):
            share = count // servers + (place < count % servers)
            argv = [sys.executable, "-m", "bench.programs.fanout_nodes", name, str(len(ports) + 1), str(share)]
            process = subprocess.Popen(
                [*argv, str(ROUND_TRIP_MS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(_end, process, real)
            assert process.stdout is not None
            ports += json.loads(process.stdout.readline())
        public = " ".join((folder / "host.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text("".join(f"[127.0.0.1]:{port} {public}\n" for port in ports))
        common = (
            f"Host *\n  HostName 127.0.0.1\n  User bench\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
            f"  IdentityAgent none\n  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking yes\n"
        )
        hosts = "".join(f"Host node{place}\n  Port {port}\n" for place, port in enumerate(ports, 1))
        (folder / "config").write_text(hosts + common)
        yield folder / "config"


def _end(process: subprocess.Popen[str], real: Counter[str]) -> None:
    """Close its stdin; it says which commands it ran for real."""
    try:
        said, _ = process.communicate(timeout=10)
        real.update(json.loads(said))
    except (subprocess.TimeoutExpired, ValueError):
        process.kill()
        process.wait()


def _tell(real: Counter[str]) -> None:
    """What took processor time of this machine that on real nodes is the nodes' own."""
    for command, times in real.most_common():
        print(f"     run by a shell {times} times: {command!r}", flush=True)


def _wall(turn: Turn, what: str) -> float:
    return sum(cost.wall for cost in turn.values()) if what == ALL else turn[what].wall


def _median(turns: Sequence[Turn], what: str) -> float:
    return statistics.median(_wall(turn, what) for turn in turns)


def _memory(turns: Sequence[Turn]) -> float:
    return max(cost.memory for turn in turns for cost in turn.values())


def _ratio(ways: dict[str, list[Turn]], what: str) -> float:
    pairs = zip(ways["launcher"], ways["ssh"], strict=True)
    return statistics.median(_wall(ours, what) / _wall(theirs, what) for ours, theirs in pairs)


def _rows(found: dict[int, dict[str, list[Turn]]]) -> list[tuple[str, ...]]:
    whats = (*COMMANDS, ALL)
    rows = [("nodes", "way", *(f"{what} s" for what in whats), "min to max", "processor s", "MiB")]
    for count, ways in found.items():
        for way, turns in ways.items():
            walls = [_wall(turn, ALL) for turn in turns]
            processor = statistics.median(sum(cost.processor for cost in turn.values()) for turn in turns)
            spread = f"{min(walls):.2f} to {max(walls):.2f}"
            memory = f"{_memory(turns):.0f}" if way == "launcher" else "-"
            seconds = (f"{_median(turns, what):.2f}" for what in whats)
            rows.append((str(count), way, *seconds, spread, f"{processor:.1f}", memory))
        rows.append((str(count), "launcher / ssh", *(f"{_ratio(ways, what):.2f}" for what in whats), "", "", ""))
    return rows


def _verdicts(found: dict[int, dict[str, list[Turn]]]) -> Iterator[str]:
    for count, ways in found.items():
        ours = ways["launcher"]
        if count == RATIO_NODES:
            for what in COMMANDS:
                yield f"{count} nodes: {what}, of ssh to all at once: {report.judged(_ratio(ways, what), RATIO_TARGET)}"
        if count == WALL_NODES:
            for what in (END, DOWN):
                yield f"{count} nodes: {what}: {report.judged(_median(ours, what), WALL_TARGET, 's')}"
        yield f"{count} nodes: {report.judged(_memory(ours), MEMORY_TARGET, 'MiB')}"
    first, last = min(found), max(found)
    for what in (*COMMANDS, ALL):
        growth = _median(found[last]["launcher"], what) / _median(found[first]["launcher"], what)
        yield f"from {first} to {last} nodes: {what} grows by a factor of {report.judged(growth, GROWTH_TARGET)}"


if __name__ == "__main__":
    sys.exit(main())
