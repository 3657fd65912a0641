"""Facts of all nodes, start and stop, from 2 to 256 nodes: ours beside parallel-ssh and a shell loop with ssh.

    pip install -e '.[bench]' && python -m bench.fanout [--nodes 2 16 64 128 256] [--repeat 3] [--json FILE]

The nodes are pretended ssh servers (bench/programs/fanout_nodes.py) with a round trip of 50 ms, in processes of their
own: their processor time is not counted, though it is taken from the same cores. Ours does all that `up` and `down` do
on a node: the look and the engine's own answers; create, files into the container, check, start; list, stop, remove,
sweep. The others run one command for each of the three, which does nothing there. So does "bare paramiko", which checks
and reads nothing: the library below ours as it comes, a thread a connection. They take turns, in changing order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import report
from bench.environment import installed

ROUND_TRIP_MS = 50
PROCESSES = 4  # for the pretended nodes
PHASES = ("facts", "start", "stop")
TARGET_NODES = 128
TARGET_MEMORY = 300.0  # MiB
LIMIT = 900.0
BARE = "bare paramiko"  # what the library below ours costs with a thread a node: no rival


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fanout", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 16, 64, 128, 256])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--sequential", type=int, default=64, metavar="N", help="one after another up to so many nodes")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": report.machine(), "round_trip_ms": ROUND_TRIP_MS, "results": []}
    for count in args.nodes:
        found["results"] += measure(count, args.repeat, sequential=count <= args.sequential)
    print()
    print(report.table(_rows(found["results"])))
    print()
    print("\n".join(_verdict(found["results"], args.nodes)))
    if args.json:
        report.write(args.json, found)
    return 0


def measure(count: int, repeat: int, *, sequential: bool) -> list[dict[str, Any]]:
    """Every way, `repeat` times (one after another: once), with so many nodes."""
    with pretended(count) as (config, key, ports):
        shell = [sys.executable, "-m", "bench.programs.fanout_shell", config, str(count)]
        ways = {
            "ours": [sys.executable, "-m", "bench.programs.fanout_ours", config, str(count)],
            "parallel-ssh": [
                *(sys.executable, "-m", "bench.programs.fanout_pssh", config, str(count), key),
                *map(str, ports),
            ],
            BARE: [
                *(sys.executable, "-m", "bench.programs.fanout_paramiko", config, str(count), key),
                *map(str, ports),
            ],
            "ssh, 32 at once": [*shell, "32"],
            "ssh, all at once": [*shell, str(count)],
        }
        values: dict[str, list[dict[str, float]]] = {}
        for turn in range(repeat):
            names = list(ways)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                values.setdefault(name, []).append(_run(name, count, ways[name]))
        if sequential:
            values["ssh, one by one"] = [_run("ssh, one by one", count, [*shell, "1"])]
    return [{"nodes": count, "way": way, "values": seen} for way, seen in values.items()]


def _run(name: str, count: int, argv: Sequence[str]) -> dict[str, float]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, check=False, env=installed())
    if done.returncode != 0:
        raise SystemExit(f"{name} with {count} nodes failed:\n{done.stderr[-3000:]}")
    value: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    value["wall"] = sum(value[phase] for phase in PHASES)
    print(f"{count:4} {name}: " + "  ".join(f"{key} {number:.2f}" for key, number in value.items()), flush=True)
    return value


@contextlib.contextmanager
def pretended(count: int) -> Iterator[tuple[str, str, list[int]]]:
    """So many nodes: an ssh config that knows them as n0, n1, ..., the key that they take, their ports."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        for key in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        ports: list[int] = []
        servers = min(PROCESSES, count)
        for place in range(servers):
            share = count // servers + (place < count % servers)
            argv = [sys.executable, str(Path(__file__).parent / "programs" / "fanout_nodes.py"), str(share)]
            process = subprocess.Popen(
                [*argv, str(ROUND_TRIP_MS), folder / "host", folder / "user.pub"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(_end, process)
            assert process.stdout is not None
            ports += json.loads(process.stdout.readline())
        public = " ".join((folder / "host.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text("".join(f"[127.0.0.1]:{port} {public}\n" for port in ports))
        common = (
            f"Host *\n  HostName 127.0.0.1\n  User bench\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
            f"  IdentityAgent none\n  UserKnownHostsFile {folder}/known_hosts\n  StrictHostKeyChecking yes\n"
        )
        hosts = "".join(f"Host n{place}\n  Port {port}\n" for place, port in enumerate(ports))
        (folder / "config").write_text(hosts + common)
        yield str(folder / "config"), str(folder / "user"), ports


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _median(result: dict[str, Any], key: str) -> float:
    return statistics.median(value[key] for value in result["values"])


def _rows(results: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows = [("nodes", "way", *(f"{phase} s" for phase in PHASES), "all s", "spread", "CPU ms a node", "MiB")]
    for result in results:
        walls = [value["wall"] for value in result["values"]]
        rows.append(
            (
                str(result["nodes"]),
                result["way"],
                *(f"{_median(result, phase):.2f}" for phase in PHASES),
                f"{_median(result, 'wall'):.2f}",
                f"{min(walls):.2f} to {max(walls):.2f}",
                f"{1000 * _median(result, 'cpu') / result['nodes']:.1f}",
                "-" if result["way"].startswith("ssh") else f"{_median(result, 'memory'):.0f}",
            )
        )
    return rows


def _verdict(results: Sequence[dict[str, Any]], counts: Sequence[int]) -> Iterator[str]:
    """Ours against the better of the others, and how it grows."""
    for count in counts:
        ours, *others = (result for result in results if result["nodes"] == count and result["way"] != BARE)
        for key, words in (("wall", "wall time"), ("cpu", "CPU")):
            best = min(others, key=lambda result: _median(result, key))
            ratio = _median(ours, key) / _median(best, key)
            target = ""
            if count == TARGET_NODES:
                target = f", target <= 1.00: {'met' if ratio <= 1 else 'not met'}"
            yield f"{count} nodes: {words} {ratio:.2f} of {best['way']}{target}"
        memory = _median(ours, "memory")
        yield f"{count} nodes: {memory:.0f} MiB, target < 300: {'met' if memory < TARGET_MEMORY else 'not met'}"
    first, last = (next(r for r in results if r["nodes"] == count) for count in (counts[0], counts[-1]))
    for key in (*PHASES, "wall", "cpu", "memory"):
        yield f"from {counts[0]} to {counts[-1]} nodes: {key} grows by {_median(last, key) / _median(first, key):.1f}"


if __name__ == "__main__":
    sys.exit(main())
