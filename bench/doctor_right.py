"""Accuracy of `launcher doctor --bench` on the test bed: `python -m bench.doctor_right`.

    python -m tests.bed up -n 8
    python -m bench.doctor_right --nodes 2 4 8 --rounds 2 --quiet 10

Each injection limits one part of one node to --share of its normal performance (0.4: 2.5 times slower), and doctor must
report that node and that cause; in a quiet run it must report nothing. All nodes of the bed share the cores and the
disk of one machine and would influence each other. Therefore every node gets the same limits: --rate Mb/s in each
direction (tc tbf on the node's interface and on its peer on this machine), --cpus processors (quota of the containers'
cgroup) and a file system on a loop device with --disk MB/s (blkio throttle). For the injected node, one of these is
reduced to the share. `loss` drops 5 % of the incoming packets (statistic match of iptables).

A result is right if it reports the node and the cause and no other node. With two nodes, doctor blames neither: then it
must show both values of the part, with the injected node as the slower one (for a link: in the injected direction). A
link of two nodes that is slow in both directions is skipped: its directions are equal, and a virtual link has no
negotiated speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bed.bed import Bed, Node
from tests.bed.host import docker
from tests.bed.settings import Settings
from tests.bed.shell import output, run
from tests.e2e.cli import Cli, bed_job

KINDS = ("link one way", "link both ways", "processor", "disk", "loss")
DISK = "/srv/bench"  # on a node, and in the container
# Except for ssh, which the launcher itself uses.
LOSS = "INPUT -p tcp ! --sport 22 -m tcp ! --dport 22 -m statistic --mode random --probability 0.05 -j DROP"
THROTTLE = "blkio.throttle.read_bps_device"
SHARED = 20.0  # MB/s per node for reads from this machine's own disk, from which all nodes load torch
MIB = 48  # size of the file that is read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=int, default=2, help="injections of each kind, on random nodes")
    parser.add_argument("--quiet", type=int, default=0, help="runs without an injection per number of nodes")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=100.0, help="Mb/s of each node in each direction")
    parser.add_argument("--cpus", type=float, default=0.0, help="processors of each node; 0: 0.8 / nodes")
    parser.add_argument("--disk", type=float, default=20.0, help="MB/s that each node reads")
    parser.add_argument(
        "--share", type=float, default=0.4, help="performance of an injected part, as a share of the others"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("doctor_right.json"))
    call = parser.parse_args()
    bed, rows, chance = Bed.attach(Settings.from_environment()), [], random.Random(call.seed)
    for count in call.nodes:
        nodes = bed.nodes[:count]
        with equal(bed, nodes, call):
            kinds = [kind for kind in call.kinds if (kind, count) != ("link both ways", 2)]
            for kind in ["quiet"] * call.quiet + kinds * call.rounds:
                rows.append(turn(bed, nodes, kind, None if kind == "quiet" else chance.choice(nodes), call))
                call.output.write_text(json.dumps(rows, indent=1))
    show(rows)
    sys.exit(0 if all(row["right"] for row in rows) else 1)


def turn(bed: Bed, nodes: Sequence[Node], kind: str, victim: Node | None, call: argparse.Namespace) -> dict[str, Any]:
    """Run doctor once and print a line with the result."""
    cli = Cli(Path.cwd(), {"LAUNCHER_SSH_CONFIG": str(bed.ssh_config)})
    job = bed_job(nodes=[node.alias for node in nodes], run={"command": ["true"]})
    job["mounts"] = {**job["mounts"], DISK: f"{DISK}:ro"}
    file = call.output.with_suffix(".yaml")
    file.write_text(json.dumps({"name": "right", **job}))
    with injected(bed, nodes, kind, victim, call):
        began = time.monotonic()
        done = cli("doctor", file, "--bench", "--minutes", call.minutes, "--json", code=None, timeout=600)
        seconds = time.monotonic() - began
    try:
        bench = json.loads(done.stdout)["bench"]
    except (ValueError, KeyError):
        raise SystemExit(f"{done.stdout}\n{done.stderr}") from None
    left = bed.wait_clean(nodes, home=True)
    found = bench["findings"]
    row = {
        "kind": kind,
        "nodes": len(nodes),
        "victim": victim and victim.alias,
        "right": right(kind, victim and victim.alias, found, len(nodes)),
        "seconds": seconds,
        "left": left,
        "exit": done.returncode,
        "findings": found,
        "measures": bench["measures"],
        "notes": bench["notes"],
    }
    reported = (
        " | ".join(f"{' -> '.join(f['nodes'])} {f['part']}: {f['what']}: {f['cause']}" for f in found) or "nothing"
    )
    name = f"{kind} {victim.alias if victim else ''} of {len(nodes)}"
    print(
        f"{'right' if row['right'] else 'WRONG'} {name:28} {seconds:4.0f} s  {reported}  {' '.join(left)}", flush=True
    )
    return row


def right(kind: str, victim: str | None, findings: Sequence[dict[str, Any]], nodes: int) -> bool:
    """Return whether the findings are correct for the injection."""
    if victim is None:
        return not findings
    first = [each["nodes"][0] for each in findings]
    into = [each["nodes"][-1] for each in findings]
    parts = {each["part"].partition(" ")[0] for each in findings}
    kinds = {way for each in findings for way in each["kinds"]}
    named = bool(findings) and set(first) == {victim}
    if kind == "processor":
        return named and parts == {"processor"}
    if kind == "disk":
        return named and parts == {DISK}
    if kind == "loss":
        lossy = any("packet loss" in each["cause"] for each in findings)
        return lossy and parts == {"link"} and (set(into) == {victim} if nodes == 2 else named)
    ways = {"link one way": {"sends"}, "link both ways": {"sends", "receives"}}[kind] if nodes > 2 else {"pair"}
    return named and parts == {"link"} and kinds == ways


@contextlib.contextmanager
def equal(bed: Bed, nodes: Sequence[Node], call: argparse.Namespace) -> Iterator[None]:
    """Give all nodes the same link rates and the same file to read."""
    with contextlib.ExitStack() as stack:
        for node in nodes:
            stack.callback(unshape, bed, node)
            shape(bed, node, out=call.rate, into=call.rate)
            stack.enter_context(disk(bed, node))
        yield


@contextlib.contextmanager
def disk(bed: Bed, node: Node) -> Iterator[None]:
    """Mount a file system with one file on the node, on a loop device of this machine."""
    with tempfile.NamedTemporaryFile(suffix=".img") as image:
        image.truncate((MIB + 16) << 20)
        run(["mkfs.ext4", "-qF", image.name])
        device = output(["losetup", "-f", "--show", image.name])
        group = Path("/sys/fs/cgroup/devices/docker", docker("inspect", "-f", "{{.Id}}", node.container))
        (group / "devices.allow").write_text("b 7:* rwm")
        number = device.removeprefix("/dev/loop")
        script = f"[ -b {device} ] || mknod {device} b 7 {number}; mkdir -p {DISK} && mount {device} {DISK} && "
        script += f"dd if=/dev/urandom of={DISK}/file bs=1M count={MIB} status=none && sync && chmod -R a+rX {DISK}"
        try:
            bed.sh(node, script)
            yield
        finally:
            bed.run(node, "sh", "-c", f"umount {DISK}; rm -rf {DISK} {device}", check=False)
            run(["losetup", "-d", device])


@contextlib.contextmanager
def injected(
    bed: Bed, nodes: Sequence[Node], kind: str, victim: Node | None, call: argparse.Namespace
) -> Iterator[None]:
    """Slow down one part. Limits of disks and processors are set in the cgroups of containers when they start."""
    share = {node: call.share if node == victim else 1.0 for node in nodes}
    disks = {node: call.disk * (share[node] if kind == "disk" else 1.0) for node in nodes}
    cpus = {node: processors(nodes, call) * (share[node] if kind == "processor" else 1.0) for node in nodes}
    slow = call.rate * call.share
    over = threading.Event()
    limiter = threading.Thread(target=limit, args=(bed, disks, cpus, over))
    limiter.start()
    try:
        if victim and kind == "loss":
            bed.sh(victim, f"iptables -A {LOSS}")
        elif victim and kind.startswith("link"):
            shape(bed, victim, out=slow, into=slow if kind == "link both ways" else call.rate)
        yield
    finally:
        over.set()
        limiter.join()
        if victim and kind == "loss":
            bed.sh(victim, f"iptables -D {LOSS}")
        elif victim and kind.startswith("link"):
            shape(bed, victim, out=call.rate, into=call.rate)


def processors(nodes: Sequence[Node], call: argparse.Namespace) -> float:
    return round(call.cpus or 0.8 / len(nodes), 2)


def limit(bed: Bed, disks: Mapping[Node, float], cpus: Mapping[Node, float], over: threading.Event) -> None:
    """Limit the benchmark's container on every node: its disk immediately, its processor (like `docker update --cpus`)
    only during the local measurements, because otherwise importing torch would take most of the time."""
    devices = {node: bed.sh(node, f"mountpoint -d {DISK}").strip() for node in disks}
    ids = {node: docker("inspect", "-f", "{{.Id}}", node.container) for node in disks}
    shared = f"{os.major(bed.settings.venv.stat().st_dev)}:{os.minor(bed.settings.venv.stat().st_dev)}"
    waiting = set(disks)
    while waiting and not over.wait(0.1):
        for node in list(waiting):
            for group in Path("/sys/fs/cgroup/cpu/docker", ids[node], "containers").glob("*/"):
                with contextlib.suppress(OSError, ValueError, IndexError):  # it is starting or has just exited
                    process = int((group / "cgroup.procs").read_text().split()[0])
                    begun = Path(f"/proc/{process}/root/output/logs/{node.alias}.log")
                    if not begun.exists():
                        continue  # a probe's container
                    throttle = Path(str(group).replace("/cgroup/cpu/", "/cgroup/blkio/"), THROTTLE)
                    throttle.write_text(f"{devices[node]} {int(disks[node] * 1e6)}")
                    text, period = begun.read_text(), int((group / "cpu.cfs_period_us").read_text())
                    if '"pairs"' in text:  # all nodes share the processors of this machine
                        if cpus[node] == max(cpus.values()):
                            (group / "cpu.cfs_quota_us").write_text("-1")
                        waiting.discard(node)
                    elif '"begun"' in text:
                        throttle.write_text(f"{shared} {int(SHARED * 1e6)}")
                        (group / "cpu.cfs_quota_us").write_text(str(int(cpus[node] * period)))


def shape(bed: Bed, node: Node, *, out: float, into: float) -> None:
    """Limit the link of a node. out, into: Mb/s."""
    limit = "burst 64kb latency 50ms"
    bed.sh(node, f"tc qdisc replace dev eth0 root tbf rate {out:.0f}mbit {limit}")
    run(["tc", "qdisc", "replace", "dev", peer(bed, node), "root", "tbf", "rate", f"{into:.0f}mbit", *limit.split()])


def unshape(bed: Bed, node: Node) -> None:
    bed.run(node, "tc", "qdisc", "del", "dev", "eth0", "root", check=False)
    run(["tc", "qdisc", "del", "dev", peer(bed, node), "root"], check=False)


def peer(bed: Bed, node: Node) -> str:
    """Return the peer of the node's interface on this machine."""
    index = bed.sh(node, "cat /sys/class/net/eth0/iflink").strip()
    for line in output(["ip", "-o", "link"]).splitlines():
        if line.startswith(f"{index}: "):
            return line.split(": ")[1].partition("@")[0]
    raise LookupError(f"{node.alias}: no interface {index} on this machine")


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'injected':16} {'nodes':>5} {'right':>7} {'seconds':>8}")
    for kind in ("quiet", *KINDS):
        for count in sorted({row["nodes"] for row in rows}):
            mine = [row for row in rows if (row["kind"], row["nodes"]) == (kind, count)]
            if mine:
                seconds = statistics.median(row["seconds"] for row in mine)
                print(f"{kind:16} {count:5} {sum(r['right'] for r in mine):3} / {len(mine)} {seconds:8.0f}")


if __name__ == "__main__":
    main()
