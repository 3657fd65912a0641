"""What --mirror costs a training step: steps during an upload to a store that takes 1 MB/s, and steps without.

    python -m bench.mirror [--arch smallcnn] [--steps 40] [--rounds 31] [--json FILE]

One process on a CPU with one thread. Both kinds of steps alternate; the ratio is the median over rounds. The store is a
server that speaks S3, in another process. Target: at most 1.02.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import report
from tests.s3 import BUCKET, s3

TARGET = 1.02
RATE = 1_000_000  # bytes per second


def measure(arch: str, steps: int, rounds: int, output: Path) -> dict[str, Any]:
    """Measure in a process of its own."""
    from train.config import parse
    from train.data.batch import micro_batches
    from train.distributed.world import start
    from train.log import Silent
    from train.mirror import Mirror, new_name
    from train.trainer import Trainer

    options = f"--data synthetic:100000 --arch {arch} --image-size 32 --batch-size 32 --headspace --workers 1"
    config = parse(f"{options} --threads 1 --device cpu --epochs 1 --output {output}".split())
    trainer = Trainer(config, start(config))
    trainer.log = Silent()
    batches = trainer.load()  # of one epoch, which has more steps than are measured
    mirror = Mirror(f"s3://{BUCKET}/run", output, True, lambda _line: None)
    mirror.begin(fresh=True)

    def timed() -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            trainer.train_step(micro_batches(batches))
        return time.perf_counter() - begun

    timed()
    size = int(timed() * 2 * RATE)  # of an upload that lasts longer than the steps
    pairs = []
    for number in range(rounds):
        (file := output / "last.pt").write_bytes(bytes(size))
        state = {"progress": {"epoch": number, "step": 0, "validated": 0}}
        mirror.offer([file], state, new_name(state), busy=False)
        during = timed()
        if not mirror.busy:
            raise SystemExit("an upload ended before the steps beside it: use fewer steps")
        while mirror.busy:
            time.sleep(0.05)
        pairs.append((during, timed()))
    mirror.end()
    trainer.close()
    ratios = [during / without for during, without in pairs]
    return {
        "ratio": report.summary(ratios),
        "step ms": round(statistics.median(without for _, without in pairs) / steps * 1000, 2),
        "upload MB": round(size / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="smallcnn")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(measure(given.arch, given.steps, given.rounds, Path(given.worker))), flush=True)
        os._exit(0)
    with s3() as store, tempfile.TemporaryDirectory(prefix="bench-mirror-") as folder:
        store.rate = RATE
        options = ["--arch", given.arch, "--steps", str(given.steps), "--rounds", str(given.rounds)]
        done = subprocess.run(
            [sys.executable, "-m", "bench.mirror", "--worker", folder, *options],
            env=os.environ | store.variables | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        store.rate = 0
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    step, size = found["step ms"], found["upload MB"]
    print(f"{given.arch}: {step} ms a step; uploads of {size} MB, {given.rounds} rounds")
    print(f"step time during an upload / without: {report.compared(found['ratio']['median'], TARGET)}")
    if given.json:
        report.write(given.json, {"machine": report.machine(), **found})


if __name__ == "__main__":
    main()
