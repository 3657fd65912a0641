"""Cost of a checkpoint for the training step: blocking time and memory, compared with a plain copy of the state.

    python -m bench.checkpoint [--arch resnet50 vit_b_16] [--method plain replicate fsdp] [--rounds 5] [--json FILE]

plain: one process. replicate and fsdp: two processes on this machine. Saves and plain copies of the same tensors
alternate; the ratio is the median over rounds. Memory is the increase of the process's peak since before the first
save, in units of the state's size. Targets: a save blocks for at most 1.5 x the copy; the peak increases by at most one
copy.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import report
from train.__main__ import leave
from train.checkpoint import map_tensors
from train.config import parse
from train.data.batch import micro_batches
from train.distributed.world import start
from train.log import Silent
from train.trainer import Trainer

METHODS = {"plain": (1, ""), "replicate": (2, "--replicate"), "fsdp": (2, "--parallel fsdp")}
BLOCKED, COPIES = 1.5, 1.0  # targets


def tensors_of(trainer: Trainer) -> list[Tensor]:
    """Return the tensors of a checkpoint that are held by this process."""
    found: list[Tensor] = []
    map_tensors(trainer.state(), lambda tensor: found.append(getattr(tensor, "_local_tensor", tensor)))
    return found


def peak() -> float:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def timed(what: Any) -> float:
    begun = time.perf_counter()
    what()
    return time.perf_counter() - begun


def measure(arch: str, method: str, rounds: int, output: str) -> dict[str, Any]:
    """Measure in every process of the run; the results are those of rank 0."""
    options = f"--data synthetic:64 --arch {arch} --batch-size 2 --headspace --workers 1 --epochs 1 --output {output}"
    config = parse(f"{options} {METHODS[method][1]} --checkpoints {output}/shared".split())
    world = start(config)
    trainer = Trainer(config, world)
    trainer.log = Silent()
    trainer.train_step(micro_batches(trainer.load()))  # creates the state of the optimizer
    trainer.store.open()
    before = peak()
    kept = [tensor.detach().clone() for tensor in tensors_of(trainer)]  # buffers for the plain copies, already paged in
    size = sum(tensor.nbytes for tensor in kept) / 1e6
    before = max(before, peak())
    blocked, copied = [], []
    for _ in range(rounds + 1):
        blocked.append(timed(trainer.save))
        trainer.store.wait()
        world.sum(torch.zeros(1))
        now = [tensor.detach() for tensor in tensors_of(trainer)]
        copied.append(timed(lambda now=now: [a.copy_(b) for a, b in zip(kept, now, strict=True)]))
    trainer.close()
    ratios = [ours / bare for ours, bare in zip(blocked[1:], copied[1:], strict=True)]
    return {
        "arch": arch,
        "method": method,
        "MB": round(size),
        "first save s": round(blocked[0], 3),
        "save s": round(statistics.median(blocked[1:]), 3),
        "copy s": round(statistics.median(copied[1:]), 3),
        "ratio": round(statistics.median(ratios), 2),
        "copies": round(max(peak() - before, 0.0) / size, 2),
    }


def launched(arch: str, method: str, rounds: int) -> dict[str, Any]:
    """Run measure() in separate processes.

    Raises:
        subprocess.CalledProcessError: one failed.
    """
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(METHODS[method][0])]
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-") as folder:
        worker = ["-m", "bench.checkpoint", "--worker", folder, "--arch", arch, "--method", method]
        done = subprocess.run(
            [sys.executable, *command, *worker, "--rounds", str(rounds)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        done.check_returncode()
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["resnet50", "vit_b_16"])
    parser.add_argument("--method", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        found = measure(given.arch[0], given.method[0], given.rounds, given.worker)
        if os.environ["RANK"] == "0":
            print(json.dumps(found), flush=True)
        leave(0)
    rows = [launched(arch, method, given.rounds) for arch in given.arch for method in given.method]
    print(report.table([list(rows[0]), *[[str(value) for value in row.values()] for row in rows]]))
    missed = [f"{row['arch']} {row['method']}" for row in rows if row["ratio"] > BLOCKED or row["copies"] > COPIES]
    print(f"target: ratio <= {BLOCKED}, copies <= {COPIES}: {'not met: ' + ', '.join(missed) if missed else 'met'}")
    if given.json:
        report.write(given.json, {"machine": report.machine(), "rows": rows})


if __name__ == "__main__":
    main()
