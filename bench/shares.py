"""Two machines of which one has half the processor: batches in proportion to their speeds, and equal ones.

    python -m tests.bed up && python -m bench.shares [--rounds 3] [--json FILE]

Both are one job on two nodes of the test bed, with the same global batch; node2 gets half a processor. Images per
second are those of the run's last intervals, as `launcher compare` has them; the two alternate.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from bench import report
from bench.environment import Caller, bed_of
from launcher.features.compare.measured import read
from launcher.records.paths import RunPaths
from tests.bed.bed import Bed
from tests.bed.host import docker
from tests.bed.settings import SITE_PACKAGES_IN_NODE

TARGET = 1.3  # shares in proportion / equal shares, images/s
SIZES = {"in proportion": (32, 16), "equal": (24, 24)}  # batch sizes of the nodes
HALF = 0.5  # processors of node2
ARGS = {"data": "synthetic:480", "arch": "cifar_resnet20", "image_size": 32, "epochs": 3, "log_every": 2}
ARGS |= {"device": "cpu", "val_interval": 3, "lr": 0.01, "headspace": True}


def images_per_s(caller: Caller, nodes: list[str], sizes: tuple[int, ...]) -> float:
    entries = [{"host": node, "args": {"batch_size": size}} for node, size in zip(nodes, sizes, strict=True)]
    mounts, env = {"/opt/venv": "/opt/venv:ro"}, {"PYTHONPATH": SITE_PACKAGES_IN_NODE, "OMP_NUM_THREADS": "1"}
    job = caller.job("shares", entries, {"module": "train", "args": ARGS}, mounts=mounts, env=env)
    caller.launcher("up", job)
    [folder] = (caller.folder / "runs").glob("shares-*")
    rate = read(RunPaths(folder), "").images_per_s
    caller.down()
    return rate


def halve(bed: Bed) -> None:
    """Give the second node half a processor."""
    docker("update", "--cpus", str(HALF), bed.nodes[1].container)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each, after one warm-up")
    parser.add_argument("--json", type=Path)
    call = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in SIZES}
    with bed_of(2) as bed, Caller.at(bed.ssh_config) as caller:
        shutil.copytree(Path(__file__).parents[1] / "train", caller.folder / "train")
        halve(bed)
        nodes = [node.alias for node in bed.nodes[:2]]
        for turn in range(call.rounds + 1):
            for name in SIZES if turn % 2 else reversed(SIZES):
                rate = images_per_s(caller, nodes, SIZES[name])
                if turn:
                    found[name].append(rate)
                    print(f"  {turn}/{call.rounds}  {name:14} {rate:7.1f} images/s", flush=True)
    ratios = [ours / equal for ours, equal in zip(found["in proportion"], found["equal"], strict=True)]
    result: dict[str, Any] = {name: report.summary(values) for name, values in found.items()}
    result["ratio"] = report.summary(ratios)
    rows = [["images/s", "median", "min", "max"]]
    rows += [[name, *(f"{each[key]:.2f}" for key in ("median", "min", "max"))] for name, each in result.items()]
    met = result["ratio"]["median"] >= TARGET
    print(f"{report.table(rows)}\ntarget of the ratio >= {TARGET}: {'met' if met else 'NOT MET'}")
    if call.json:
        report.write(call.json, report.machine() | result)


if __name__ == "__main__":
    main()
