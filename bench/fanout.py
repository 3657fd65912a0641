"""2 to 256 nodes: start of a run, end of a run and `down`, compared with concurrent ssh to all nodes.

    pip install -e '.[bench]' && python -m bench.fanout [--nodes 2 16 64 128 256] [--repeat 3] [--json FILE]

- start: `launcher up -d`, from the call to its return. Baseline: `ssh NODE docker run`.
- end: an attached `launcher up`, from the end of the last container to its exit, files of every node (four, 20 kB)
  collected. Baseline: `ssh NODE cat FILES`.
- down: `launcher down` of a running job: containers stopped, files collected, containers removed. Baseline:
  `ssh NODE docker rm`.

The nodes are simulated (bench/programs/fanout_nodes.py): an ssh server each, a round trip of 50 ms away, in separate
processes. Their CPU time is not counted, although it comes from the same cores. The launcher does everything that it
does on real nodes; the baseline's commands return immediately, and only `cat` does anything. The two alternate; a ratio
is the median over turns.
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
from bench.programs.fanout_commands import node_address
from bench.programs.fanout_engine import IMAGE, SECONDS

ROUND_TRIP_MS = 50
PROCESSES = 4  # for the simulated nodes
START, END, DOWN = "start", "end", "down"
ALL = "all three"
COMMANDS = {START: f"docker run -d {IMAGE} true", END: "cat job", DOWN: "docker rm -f any"}
RATIO_NODES, RATIO_TARGET = 128, 1.0  # launcher / ssh, for each of the three
WALL_NODES, WALL_TARGET = 64, 3.0  # seconds, end and down
MEMORY_TARGET = 300.0  # MiB
GROWTH_TARGET = 6.0  # factor from the fewest nodes to the most

Turn = dict[str, Cost]  # by START, END, DOWN


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fanout", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 16, 64, 128, 256])
    parser.add_argument("--repeat", type=int, default=3, help="turns of each, after one launcher turn to warm up")
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
                "method": method,
                "turns": [{what: asdict(cost) for what, cost in turn.items()} for turn in turns],
            }
            for count, methods in found.items()
            for method, turns in methods.items()
        ]
        report.write(call.json, {"machine": machine, "round_trip_ms": ROUND_TRIP_MS, "results": results})
    return 0


def measure(count: int, repeat: int) -> dict[str, list[Turn]]:
    """Both methods with `count` nodes."""
    found: dict[str, list[Turn]] = {"launcher": [], "ssh": []}
    hosts = [f"node{number + 1}" for number in range(count)]
    with (
        simulated(count) as config,
        tempfile.TemporaryDirectory(prefix="bench-cache-") as cache,
        Caller.at(config, XDG_CACHE_HOME=cache) as caller,
    ):
        methods = {"launcher": lambda: _launcher(caller, hosts), "ssh": lambda: _ssh(config, hosts)}
        methods["launcher"]()  # fills its caches of engines and images
        for turn in range(repeat):
            for name in sorted(methods, reverse=bool(turn % 2)):
                costs = methods[name]()
                found[name].append(costs)
                figures = "  ".join(f"{what} {cost.wall:.2f} s" for what, cost in costs.items())
                print(f"{count:4} {name:8} {figures}", flush=True)
    return found


def _launcher(caller: Caller, hosts: Sequence[str]) -> Turn:
    # Each node has its own loopback address. The launcher tests that the others reach the first node.
    nodes = [{"host": host, "address": node_address(number)} for number, host in enumerate(hosts, 1)]

    def job(name: str, seconds: float) -> str:
        env = {SECONDS: f"{seconds:g}"}
        return caller.job(name, nodes, {"command": ["true"]}, image={"ref": IMAGE}, env=env)

    costs = {START: caller.launcher("up", "-d", job("bench-long", 3600)), DOWN: caller.launcher("down")}
    caller.forget()
    whole = caller.launcher("up", job("bench-short", 3 + len(hosts) / 25))  # long enough to follow all nodes
    costs[END] = Cost(caller.seconds_since_end(), whole.processor, whole.memory)
    [run] = caller.folder.glob("runs/*")
    rank_logs = len(list(run.glob("logs/*.log"))) - len(hosts)  # every node also has its own log
    if rank_logs != len(hosts):
        raise RuntimeError(f"collected the files of {rank_logs} nodes, not of {len(hosts)}")
    caller.down()
    return {what: costs[what] for what in COMMANDS}


def _ssh(config: Path, hosts: Sequence[str]) -> Turn:
    return {what: ssh_to_all(config, hosts, command) for what, command in COMMANDS.items()}


@contextlib.contextmanager
def simulated(count: int) -> Iterator[Path]:
    """Runs `count` simulated nodes and yields an ssh config that knows them as node1, node2, ..."""
    with tempfile.TemporaryDirectory(prefix="bench-nodes-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "bin").mkdir()
        (folder / "bin" / "docker").write_text("#!/bin/sh\n")
        (folder / "bin" / "docker").chmod(0o755)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        ports: list[int] = []
        real: Counter[str] = Counter()
        stack.callback(_print_real, real)
        servers = min(PROCESSES, count)
        for index in range(servers):
            share = count // servers + (index < count % servers)
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
        hosts = "".join(f"Host node{number}\n  Port {port}\n" for number, port in enumerate(ports, 1))
        (folder / "config").write_text(hosts + common)
        yield folder / "config"


def _end(process: subprocess.Popen[str], real: Counter[str]) -> None:
    """Closes the process's stdin, upon which it prints the commands that it ran in a shell."""
    try:
        output, _ = process.communicate(timeout=10)
        real.update(json.loads(output))
    except (subprocess.TimeoutExpired, ValueError):
        process.kill()
        process.wait()


def _print_real(real: Counter[str]) -> None:
    """Prints the commands that used CPU time of this machine; on real nodes it would be the nodes' own."""
    for command, times in real.most_common():
        print(f"     run in a shell {times} times: {command!r}", flush=True)


def _wall(turn: Turn, what: str) -> float:
    return sum(cost.wall for cost in turn.values()) if what == ALL else turn[what].wall


def _median(turns: Sequence[Turn], what: str) -> float:
    return statistics.median(_wall(turn, what) for turn in turns)


def _memory(turns: Sequence[Turn]) -> float:
    return max(cost.memory for turn in turns for cost in turn.values())


def _ratio(methods: dict[str, list[Turn]], what: str) -> float:
    pairs = zip(methods["launcher"], methods["ssh"], strict=True)
    return statistics.median(_wall(ours, what) / _wall(theirs, what) for ours, theirs in pairs)


def _rows(found: dict[int, dict[str, list[Turn]]]) -> list[tuple[str, ...]]:
    whats = (*COMMANDS, ALL)
    rows = [("nodes", "method", *(f"{what} s" for what in whats), "min to max", "CPU s", "MiB")]
    for count, methods in found.items():
        for method, turns in methods.items():
            walls = [_wall(turn, ALL) for turn in turns]
            processor = statistics.median(sum(cost.processor for cost in turn.values()) for turn in turns)
            spread = f"{min(walls):.2f} to {max(walls):.2f}"
            memory = f"{_memory(turns):.0f}" if method == "launcher" else "-"
            seconds = (f"{_median(turns, what):.2f}" for what in whats)
            rows.append((str(count), method, *seconds, spread, f"{processor:.1f}", memory))
        rows.append((str(count), "launcher / ssh", *(f"{_ratio(methods, what):.2f}" for what in whats), "", "", ""))
    return rows


def _verdicts(found: dict[int, dict[str, list[Turn]]]) -> Iterator[str]:
    for count, methods in found.items():
        ours = methods["launcher"]
        if count == RATIO_NODES:
            for what in COMMANDS:
                ratio = report.compared(_ratio(methods, what), RATIO_TARGET)
                yield f"{count} nodes: {what}, ratio to concurrent ssh: {ratio}"
        if count == WALL_NODES:
            for what in (END, DOWN):
                yield f"{count} nodes: {what}: {report.compared(_median(ours, what), WALL_TARGET, 's')}"
        yield f"{count} nodes: {report.compared(_memory(ours), MEMORY_TARGET, 'MiB')}"
    first, last = min(found), max(found)
    for what in (*COMMANDS, ALL):
        growth = _median(found[last]["launcher"], what) / _median(found[first]["launcher"], what)
        yield f"from {first} to {last} nodes: {what} grows by a factor of {report.compared(growth, GROWTH_TARGET)}"


if __name__ == "__main__":
    sys.exit(main())
