"""Copying an image to 2 and 4 nodes of the test bed, compared with `docker save | ssh | docker load` per node.

    python -m bench.image_ship [--nodes 2 4] [--stores classic containerd mixed] [--size 1.0] [--repeat 2]
        [--json FILE]

The image is Debian plus files of this Python environment, 1 GB by default, in three layers. Both methods start with
nodes that have only Debian and end with the same image on every node; they alternate within one run. Then one more pip
package is installed and copied by both methods, and finally an image that is already on the nodes.
Bytes are those that this machine sends to one node. CPU seconds are those of the whole machine: the nodes share its
cores, unlike real nodes. It uses a separate bed and leaves it up: LAUNCHER_BED_NAME=launcher-bench python -m tests.bed
down.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import report
from launcher.image.distribution import provide
from launcher.image.export import export
from launcher.image.image_locations import ImageLocations, image_store
from launcher.node.connect import caller_engine, connect
from tests.bed import cluster, faults
from tests.bed.bed import Bed
from tests.bed.settings import TRAIN_IMAGE, Settings

FIRST, SECOND = "launcher-bench:first", "launcher-bench:second"
LIMITS = {2: 0.75, 4: 0.6}
DELTA_TIME, DELTA_BYTES, NOTHING = 0.1, 1.05, 0.1
STORES = {"classic": slice(0), "containerd": slice(None), "mixed": slice(1, None, 2)}  # nodes with containerd's store
PACKAGE = "rich"  # copied from this environment, as if by `pip install`


def main() -> int:
    """Returns 0 if every ratio is within its limit, else 1."""
    parser = argparse.ArgumentParser(prog="python -m bench.image_ship", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4], choices=sorted(LIMITS))
    parser.add_argument("--stores", nargs="+", default=["classic"], choices=STORES)
    parser.add_argument("--size", type=float, default=1.0, help="GB of real files in the image")
    parser.add_argument("--repeat", type=int, default=2, help="first copies of each method")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    call = parser.parse_args()
    os.environ.setdefault("LAUNCHER_BED_NAME", "launcher-bench")
    settings = Settings.from_environment()
    with cluster.locked(settings, "session"), tempfile.TemporaryDirectory(prefix="launcher-bench-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # without link speeds that were measured under another load
        cluster.up(settings, max(call.nodes))
        bed = Bed.attach(settings)
        make_images(call.size)
        result: dict[str, Any] = {"machine": report.machine(), "rounds": []}
        for store in call.stores:
            with faults.containerd_store(bed, *bed.nodes[: max(call.nodes)][STORES[store]]):
                for count in call.nodes:
                    result["rounds"].append({"store": store, **measure(bed, count, call.repeat)})
                    show({"rounds": result["rounds"][-1:]})
                clear(bed)
        result["machine"]["load_after"] = round(os.getloadavg()[0], 2)
    if call.json:
        report.write(call.json, result)
    return 0 if all(within_limit(row) for row in rows(result)) else 1


def make_images(gigabytes: float) -> None:
    """FIRST: Debian with files in three layers. SECOND: one more pip package."""
    with tempfile.TemporaryDirectory(prefix="launcher-bench-", dir=Path.home()) as folder:
        root = Path(folder)
        lines = [f"FROM {TRAIN_IMAGE}"]
        for layer, files in enumerate(real_files(int(gigabytes * 1e9), 3)):
            for number, path in enumerate(files):
                target = root / f"layer{layer}" / str(number) / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
            lines.append(f"COPY layer{layer} /opt/layer{layer}")
        build(root, lines, FIRST)
        shutil.copytree(next(Path(sys.prefix).rglob(f"{PACKAGE}/__init__.py")).parent, root / "package")
        build(root, [f"FROM {FIRST}", "COPY package /opt/package"], SECOND)


def real_files(wanted: int, layers: int) -> list[list[Path]]:
    """Files of this Python environment, `wanted` bytes in total, spread over the layers; none fills half a layer."""
    found: list[list[Path]] = [[] for _ in range(layers)]
    taken = 0
    for path in sorted(Path(sys.prefix).rglob("*")):
        if taken >= wanted:
            return found
        if path.is_file() and not path.is_symlink() and path.stat().st_size < wanted // layers // 2:
            found[taken * layers // wanted].append(path)
            taken += path.stat().st_size
    return found


def build(folder: Path, lines: Sequence[str], tag: str) -> None:
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
    subprocess.run(
        ["docker", "build", "-q", "-t", tag, str(folder)],
        env={**os.environ, "DOCKER_BUILDKIT": "0"}, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def measure(bed: Bed, count: int, repeat: int) -> dict[str, Any]:
    """Seconds, CPU seconds and bytes of both methods, on the first `count` nodes; medians for the first ship."""
    nodes = bed.nodes[:count]
    hosts = [(node.alias, node.alias) for node in nodes]
    found: dict[str, Any] = {"nodes": count}
    with caller_engine() as local, connect(hosts, ssh_config=bed.ssh_config) as fleet:
        assert local is not None
        info, more = image_store(local).inspect(FIRST), image_store(local).inspect(SECOND)
        assert info is not None
        assert more is not None
        found["changed_bytes"] = sum(map(len, export(local, more, len(info.layers))))

        def ours(name: str) -> int:
            return max(provide(name, ImageLocations(fleet.engines, local, discard)).shipped.values(), default=0)

        methods = {"by_hand": lambda name: by_hand(bed, name, hosts), "ours": ours}
        firsts: dict[str, list[dict[str, float]]] = {who: [] for who in methods}
        for turn in range(repeat):
            for who in sorted(methods, reverse=turn % 2 == 1):
                clear(bed)
                firsts[who].append(timed(partial(methods[who], FIRST)))
        for who, method in methods.items():
            found[f"first_{who}"] = {key: statistics.median(one[key] for one in firsts[who]) for key in firsts[who][0]}
            for node in nodes:
                bed.run(node, "docker", "image", "rm", SECOND, check=False)
            found[f"delta_{who}"] = timed(partial(method, SECOND))
        found["nothing_ours"] = timed(partial(ours, SECOND))
    return found


def discard(line: str) -> None:
    """Discards the progress messages; the table shows the result."""


def by_hand(bed: Bed, name: str, hosts: Sequence[tuple[str, str]]) -> int:
    """Copy the image with shell commands, one node after another; return the bytes sent to one node."""
    sent = 0
    for _, alias in hosts:
        command = f'docker save {name} | tee >(wc -c >&2) | ssh -F "{bed.ssh_config}" {alias} docker load -q'
        done = subprocess.run(["bash", "-c", command], check=True, capture_output=True, text=True)
        sent = int(done.stderr.split()[0])
    return sent


def timed(action: Callable[[], int]) -> dict[str, float]:
    """Seconds and CPU seconds of an action that returns the number of bytes sent."""
    os.sync()  # so that pending writes of the other method are not counted
    began, busy = time.monotonic(), cpu_seconds()
    sent = action()
    return {
        "seconds": round(time.monotonic() - began, 2),
        "cpu_seconds": round(cpu_seconds() - busy, 1),
        "bytes": sent,
    }


def cpu_seconds() -> float:
    """Busy seconds of all cores since boot: user, nice, system, irq, softirq."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(fields[index] for index in (0, 1, 2, 5, 6)) / os.sysconf("SC_CLK_TCK")


def clear(bed: Bed) -> None:
    """Removes both images from every node."""
    for node in bed.nodes:
        bed.run(node, "docker", "image", "rm", "-f", SECOND, FIRST, check=False)
        bed.run(node, "docker", "image", "prune", "-f", check=False)


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per comparison: what, nodes, by hand, ours, ratio, limit."""
    found = []
    for row in result["rounds"]:
        count, store = row["nodes"], row["store"]
        for what, limit in (("first", LIMITS[count]), ("delta", DELTA_TIME)):
            hand, mine = row[f"{what}_by_hand"], row[f"{what}_ours"]
            found.append(
                {
                    "what": "first ship" if what == "first" else "one more package",
                    "nodes": count,
                    "store": store,
                    "hand": hand,
                    "ours": mine,
                    "ratio": mine["seconds"] / hand["seconds"],
                    "limit": limit,
                }
            )
        sent = row["delta_ours"]["bytes"] / row["changed_bytes"]
        both = {"nodes": count, "store": store}
        found.append({"what": "bytes / changed layers", **both, "ratio": sent, "limit": DELTA_BYTES})
        each = row["nothing_ours"]["seconds"] / count
        found.append({"what": "already there, s per node", **both, "ratio": each, "limit": NOTHING})
    return found


def within_limit(row: dict[str, Any]) -> bool:
    return bool(row["ratio"] <= row["limit"])


def show(result: dict[str, Any]) -> None:
    titles = f"{'':26}{'store':>11}{'nodes':>6}{'by hand':>10}{'ours':>10}{'CPU s':>14}{'MB per node':>18}"
    print(f"{titles}{'ratio':>8}{'limit':>7}")
    for row in rows(result):
        hand, mine = row.get("hand"), row.get("ours")
        shown = f"{row['what']:26}{row['store']:>11}{row['nodes']:>6}"
        if hand and mine:
            cpu = f"{hand['cpu_seconds']:.0f} -> {mine['cpu_seconds']:.0f}"
            sent = f"{hand['bytes'] / 1e6:.1f} -> {mine['bytes'] / 1e6:.1f}"
            shown += f"{hand['seconds']:>9.1f}s{mine['seconds']:>9.1f}s{cpu:>14}{sent:>18}"
        else:
            shown += " " * 52
        print(f"{shown}{row['ratio']:>8.2f}{row['limit']:>7}{'' if within_limit(row) else '  MISSED'}")


if __name__ == "__main__":
    sys.exit(main())
