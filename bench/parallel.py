"""Every parallel method on the same images at the same global batch, on this machine, in one table.

    python -m bench.parallel [--arch A] [--batch B] [--epochs E] [--repeats R] [--json FILE]

`single` is the baseline. On CPU all processes share the cores, so the speed-up shows the overhead that a method adds to
the same work, not a gain. Methods alternate, so that a slow phase of the machine affects all of them. For dual_batch,
--batch is the sum of its workers' batches.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.report import machine, summary, table, write
from launcher.records.compare import cells, compare
from launcher.records.measured import Measured, measure

LIMIT = 540.0  # seconds for one run
# name -> processes, and options for a global batch of {batch}; {half} is half of it
METHODS: dict[str, tuple[int, str]] = {
    "single": (1, "--batch-size {batch}"),
    "dp": (1, "--parallel dp --replicas 2 --batch-size {batch}"),
    "ddp": (2, "--parallel ddp --batch-size {half}"),
    "model": (4, "--parallel model --batch-size {batch}"),
    "pipeline gpipe": (4, "--parallel pipeline --pipeline-schedule gpipe --batch-size {batch}"),
    "pipeline 1f1b": (4, "--parallel pipeline --pipeline-schedule 1f1b --batch-size {batch}"),
    "dual_batch": (3, "--parallel dual_batch --schedule multistep --warmup 0 --batch-size {half}"),
}


def run(name: str, arch: str, batch: int, epochs: int, data: str) -> Measured:
    """One training with that method; returns its measurements.

    Raises:
        subprocess.CalledProcessError: the training failed; its output was printed.
    """
    processes, options = METHODS[name]
    output = tempfile.mkdtemp(prefix="bench-parallel-")
    common = f"--data {data} --arch {arch} --epochs {epochs} --image-size 32 --val-resize 32 --augment shift --flip 0"
    steady = "--last-batch drop --device cpu --workers 1 --log-every 5 --resume none"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    argv = [sys.executable, *torchrun, "-m", "train", *common.split(), *steady.split(), "--output", output]
    argv += options.format(batch=batch, half=batch // 2).split()
    try:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
            done.check_returncode()
        lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    finally:
        shutil.rmtree(output)
    return measure(lines, name, name)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--arch", default="cifar_resnet20")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--data", default="jobs/data/digits.tar")
    options.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    runs: dict[str, list[Measured]] = {name: [] for name in given.methods}
    for _ in range(given.repeats):
        for name in given.methods:
            runs[name].append(run(name, given.arch, given.batch, given.epochs, given.data))
    middle = [_median(found) for found in runs.values()]
    rows = compare(middle, "single" if "single" in runs else None)
    print(table(cells(rows)))
    if given.json:
        rates = {name: summary([one.images_per_s for one in found]) for name, found in runs.items()}
        result: dict[str, Any] = {"machine": machine(), "images_per_s": rates, "rows": [row.to_dict() for row in rows]}
        write(given.json, result)


def _median(found: list[Measured]) -> Measured:
    """The run whose rate is nearest to the median."""
    middle = statistics.median(one.images_per_s for one in found)
    return min(found, key=lambda one: abs(one.images_per_s - middle))


if __name__ == "__main__":
    main()
