"""Copying data to several nodes of the test bed over links of 100 Mb/s, compared with rsync and tar.

    python -m bench.data [--nodes 4] [--size 512MiB] [--files 0] [--rate 100mbit] [--repeat 1] [--json FILE]

The source is this machine, connected through the bed's bridge; each node sends through its eth0. Both are limited by
`tc qdisc tbf`, with a throughput of 96 Mb/s. Compared in one run, each starting with empty nodes: the launcher to all
nodes, the launcher to one node, rsync in a loop, and rsync to all nodes concurrently. With `--nodes 1` the launcher is
compared with nc, which neither encrypts nor hashes. With `--files N`, N files of 10 KiB are copied to one node,
compared with `tar | ssh tar`.

Requires iproute2 and rsync or nc (OpenBSD) on this machine; the program and its libraries are copied to the nodes. Uses
a separate bed and leaves it up: LAUNCHER_BED_NAME=launcher-bench python -m tests.bed down. Exit code 1: a limit was
missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import report
from tests.bed import cluster
from tests.bed.bed import Bed, Node
from tests.bed.settings import TRAIN_IMAGE, TRAINER, Settings

SMALL = 10 << 10
AT_LEAST = {"loop": 3.0, "at_once": 2.0, "nc": 0.7}  # their time divided by that of the launcher
AT_MOST = {"one": 1.3, "bytes": 1.05, "tar": 1.3}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
NC_PORT = 7000
RSYNC = ("loop", "at_once")
WAYS = ("ours", "ours_one", *RSYNC)
COPY = "/home/trainer/copy"


def main() -> int:
    """Returns 0 if every ratio is within its limit, else 1."""
    parser = argparse.ArgumentParser(prog="python -m bench.data", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--size", type=_size, default="512MiB")
    parser.add_argument("--files", type=int, default=0, help=f"number of files of {SMALL} bytes, to one node")
    parser.add_argument("--rate", default="100mbit", help="rate of every link in the format of tc; none: unlimited")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, help="methods for a large file to several nodes"
    )
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all values to this file")
    call = parser.parse_args()
    os.environ.setdefault("LAUNCHER_BED_NAME", "launcher-bench")
    settings, count = Settings.from_environment(), 1 if call.files else call.nodes
    with cluster.locked(settings, "session"), tempfile.TemporaryDirectory(prefix="launcher-bench-") as folder:
        cluster.up(settings, count)
        bed = Bed.attach(settings)
        bench = Bench(bed, bed.nodes[:count], Path(folder))
        data = (
            make_files(Path(folder) / "data", call.files) if call.files else make_file(Path(folder) / "data", call.size)
        )
        if not call.files and (count == 1 or {*RSYNC} & {*call.ways}):
            install("nc" if count == 1 else "rsync", bench.nodes)
        result: dict[str, Any] = {"machine": report.machine(), "nodes": count, "bytes": size_of(data), "rounds": []}
        with shaped(bed, bench.nodes, call.rate):
            for _ in range(call.repeat):
                result["rounds"].append(bench.small(data) if call.files else bench.large(data, call.ways))
                print(json.dumps(result["rounds"][-1]), flush=True)
        result["ratios"] = ratios(result)
    good = True
    for name, value in result["ratios"].items():
        kept = value >= AT_LEAST[name] if name in AT_LEAST else value <= AT_MOST[name]
        good &= kept
        print(f"{name:8} {value:6.2f}  limit {(AT_LEAST | AT_MOST)[name]}  {'ok' if kept else 'MISSED'}")
    if call.json:
        report.write(call.json, result)
    return 0 if good else 1


class Bench:
    """The nodes, and the methods of copying data to them."""

    def __init__(self, bed: Bed, nodes: Sequence[Node], folder: Path) -> None:
        self.bed, self.nodes, self._folder = bed, nodes, folder
        self._bridge = Path("/sys/class/net") / bridge(bed) / "statistics" / "tx_bytes"

    def large(self, data: Path, ways: Sequence[str]) -> dict[str, Any]:
        if len(self.nodes) == 1:
            return {
                "ours": self._timed(lambda: self._push(data, self.nodes)),
                "nc": self._timed(lambda: self._nc(data)),
            }
        actions: dict[str, Callable[[], Any]] = {
            "ours": lambda: self._push(data, self.nodes),
            "ours_one": lambda: self._push(data, self.nodes[:1]),
            "loop": lambda: [self._rsync(data, node) for node in self.nodes],
            "at_once": lambda: self._rsync_all(data),
        }
        return {way: self._timed(actions[way]) for way in WAYS if way in {"ours", *ways}}

    def small(self, data: Path) -> dict[str, Any]:
        return {
            "ours": self._timed(lambda: self._push(data, self.nodes)),
            "tar": self._timed(lambda: self._tar(data)),
        }

    def _timed(self, action: Callable[[], Any]) -> dict[str, Any]:
        for node in self.nodes:
            self.bed.sh(node, f"rm -rf /home/{TRAINER}/.launcher {COPY}", timeout=600)
        shutil.rmtree(self._folder / "cache", ignore_errors=True)
        os.sync()
        sent, began = int(self._bridge.read_text()), time.monotonic()
        result = action()
        seconds = round(time.monotonic() - began, 2)
        wire = int(self._bridge.read_text()) - sent
        return {
            "seconds": seconds,
            "wire": wire,
            "sent": result.get("sent", wire) if isinstance(result, dict) else wire,
        }

    def _push(self, data: Path, nodes: Sequence[Node]) -> dict[str, Any]:
        argv = [sys.executable, "-m", "launcher", "data", "push", data, "--image", TRAIN_IMAGE, "--json"]
        names = ",".join(node.alias for node in nodes)
        more = {"LAUNCHER_SSH_CONFIG": str(self.bed.ssh_config), "XDG_CACHE_HOME": str(self._folder / "cache")}
        done = subprocess.run([*argv, "--nodes", names], env={**os.environ, **more}, check=True, stdout=subprocess.PIPE)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def _rsync(self, data: Path, node: Node) -> None:
        ssh = f"ssh -F {self.bed.ssh_config}"
        subprocess.run(["rsync", "-a", "--whole-file", "-e", ssh, data, f"{node.alias}:{COPY}/"], check=True)

    def _rsync_all(self, data: Path) -> None:
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(lambda node: self._rsync(data, node), self.nodes))

    def _nc(self, data: Path) -> None:
        node = self.nodes[0]
        remote = f"mkdir {COPY} && timeout 900 nc -l {NC_PORT} >{COPY}/pack"
        ready = f"until grep -q :{NC_PORT:04X} /proc/net/tcp; do sleep 0.05; done"
        with ThreadPoolExecutor() as pool:
            receiver = pool.submit(self.bed.sh, node, remote, timeout=900)
            self.bed.sh(node, ready, timeout=30)
            with (data / "pack").open("rb") as file:
                subprocess.run(["nc", "-N", node.address, str(NC_PORT)], stdin=file, check=True)
            receiver.result()

    def _tar(self, data: Path) -> None:
        remote = f"mkdir {COPY} && tar -C {COPY} -x"
        command = f'tar -C "$1" -c . | ssh -F "$2" {self.nodes[0].alias} "{remote}"'
        subprocess.run(["bash", "-o", "pipefail", "-c", command, "bash", data, self.bed.ssh_config], check=True)


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of the sums over all rounds."""
    rounds = result["rounds"]

    def seconds(way: str) -> float:
        return float(sum(each[way]["seconds"] for each in rounds))

    found = {"bytes": max(each["ours"]["sent"] for each in rounds) / result["bytes"]}
    if "tar" in rounds[0]:
        return {**found, "tar": seconds("ours") / seconds("tar")}
    compared = {way: seconds(way) / seconds("ours") for way in AT_LEAST if way in rounds[0]}
    one = {"one": seconds("ours") / seconds("ours_one")} if "ours_one" in rounds[0] else {}
    return {**found, **compared, **one}


def make_file(folder: Path, size: int) -> Path:
    folder.mkdir()
    with (folder / "pack").open("wb") as file:
        for start in range(0, size, 1 << 24):
            file.write(os.urandom(min(1 << 24, size - start)))
    return folder


def make_files(folder: Path, count: int) -> Path:
    """Create files, a thousand per folder."""
    rand = random.Random(0)
    for number in range(count):
        subfolder = folder / f"{number // 1000:05d}"
        subfolder.mkdir(parents=True, exist_ok=True)
        (subfolder / f"{number:07d}.jpg").write_bytes(rand.randbytes(SMALL))
    return folder


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def bridge(bed: Bed) -> str:
    """Return the interface through which this machine sends to the nodes."""
    argv = ["docker", "network", "inspect", "-f", "{{.Id}}", bed.settings.name]
    return "br-" + subprocess.run(argv, check=True, capture_output=True, text=True).stdout[:12]


@contextmanager
def shaped(bed: Bed, nodes: Sequence[Node], rate: str) -> Iterator[None]:
    """Limit the outgoing rate of every link."""
    if rate == "none":
        yield
        return
    interface, queue = bridge(bed), f"tbf rate {rate} burst 64kb latency 100ms"
    with ExitStack() as undone:
        subprocess.run(["tc", "qdisc", "replace", "dev", interface, "root", *queue.split()], check=True)
        undone.callback(subprocess.run, ["tc", "qdisc", "del", "dev", interface, "root"], check=False)
        for node in nodes:
            bed.sh(node, f"tc qdisc replace dev eth0 root {queue}")
            undone.callback(bed.sh, node, "tc qdisc del dev eth0 root || true")
        yield


def install(name: str, nodes: Sequence[Node]) -> None:
    """Copy a program and its libraries to the nodes, which run the same Debian release as this machine."""
    program = shutil.which(name)
    if program is None:
        sys.exit(f"bench.data: this machine has no {name}: apt-get install rsync netcat-openbsd")
    linked = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    files = [program, *re.findall(r"=> (/\S+(?:popt|xxhash|lz4|zstd|acl|bsd|libmd)\S*)", linked)]
    for node in nodes:
        for file in files:
            target = f"{node.container}:{Path(file).parent}/"
            subprocess.run(["docker", "cp", "-L", "-q", file, target], check=True, stdout=subprocess.DEVNULL)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+)(KiB|MiB|GiB)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text}: expected a size such as 512MiB")
    return int(found[1]) * UNITS[found[2]]


if __name__ == "__main__":
    sys.exit(main())
