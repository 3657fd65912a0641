"""The same training as plain processes and in a container: images per second, ratio and its causes.

    python -m tests.bed up && python -m bench.container [--repeat 3] [--images 256] [--json FILE]

Experiment 0 found the container slower than the host. Each variant changes one thing: the decoder (a slim image has no
compiler, so the fastest one cannot be built in it), shared memory (Docker's 64 MB instead of the host's), or the CPUs
that the container may use. `launcher up` runs each variant on this machine, with the same Python environment (mounted
into the container), on ImageNet-sized JPEGs. The variants alternate. Images per CPU-second of the trainer are the
figure least affected by other load on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench import report
from bench.loader import make_images
from launcher.records.measured import steady_rate
from tests.bed.settings import TRAIN_IMAGE

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 540.0
MOUNTED = "/bench"


@dataclass(frozen=True)
class Variant:
    """One row of the table: a runtime and changes to the job."""

    name: str
    docker: bool
    args: Mapping[str, Any]
    keys: Mapping[str, Any]


VARIANTS = (
    Variant("host", False, {}, {}),
    Variant("host, Pillow", False, {"decoder": "pil"}, {}),
    Variant("container", True, {}, {}),
    Variant("container, Pillow", True, {"decoder": "pil"}, {}),
    Variant("container, 64 MB shm", True, {}, {"docker": {"ipc": "private"}, "resources": {"shm": "64m"}}),
    Variant("container, 1 CPU", True, {}, {"resources": {"cpus": 1}}),
)


@dataclass(frozen=True)
class Result:
    """One training."""

    images_per_s: float
    images_per_cpu_s: float  # of the whole training, validation included
    data_wait: float  # mean fraction of the time
    decoder: str
    torch: str


def job(variant: Variant, data: Path, epochs: int) -> dict[str, Any]:
    """The content of the job file."""
    path = f"{MOUNTED}/data" if variant.docker else str(data)
    args = {"data": path, "arch": "smallcnn", "image_size": 64, "epochs": epochs, "batch_size": 32, "log_every": 2}
    args |= {"workers": 2, "lr": 0.01, "resume": "none", **variant.args}
    found: dict[str, Any] = {"name": "bench-container", "nodes": ["local"], "gpus": "none", "code": str(ROOT)}
    found |= {"run": {"module": "train", "args": args}, "env": {"OMP_NUM_THREADS": 1}, **variant.keys}
    if not variant.docker:
        return found | {"runtime": "process"}
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    found["image"] = {"ref": TRAIN_IMAGE}
    found["mounts"] = {str(data): f"{MOUNTED}/data:ro", str(packages): f"{MOUNTED}/{python}:ro"}
    found["env"] = {**found["env"], "PYTHONPATH": f"{MOUNTED}/{python}"}
    return found


def run(variant: Variant, data: Path, epochs: int) -> Result:
    """One training.

    Raises:
        subprocess.CalledProcessError: the training failed; its output was printed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-container-") as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(yaml.safe_dump(job(variant, data, epochs)))
        argv = [sys.executable, "-m", "launcher", "up", str(path)]
        done = subprocess.run(argv, cwd=folder, env=_env(), capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
            done.check_returncode()
        metrics = next(Path(folder).glob("runs/*/metrics.jsonl"))
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        down = [sys.executable, "-m", "launcher", "down", "--purge"]
        subprocess.run(down, cwd=folder, env=_env(), capture_output=True, check=True)
    start = next(line for line in lines if line["kind"] == "start")
    waits = [line["data_wait"] for line in lines if line["kind"] == "step"]
    images = sum(line["train"]["images"] for line in lines if line["kind"] == "epoch")
    cpu = next(line for line in lines if line["kind"] == "end")["cpu_seconds"]
    return Result(
        steady_rate(lines), images / cpu, statistics.mean(waits), start["decoder"], start["versions"]["torch"]
    )


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _ratio(kind: str, ours: list[Result], host: list[Result]) -> str:
    """The median of the ratios of each turn, so that a slow phase of the machine affects both sides."""
    return f"{statistics.median(getattr(a, kind) / getattr(b, kind) for a, b in zip(ours, host, strict=True)):.2f}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--images", type=int, default=256)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    found: dict[str, list[Result]] = {variant.name: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="bench-container-data-") as folder:
        data = Path(folder)
        data.chmod(0o755)  # the container's user reads it
        make_images(data, given.images)
        for turn in range(given.repeat):
            for variant in VARIANTS if turn % 2 == 0 else VARIANTS[::-1]:
                found[variant.name].append(run(variant, data, given.epochs))
    rows = [("", "images/CPU s", "min", "max", "ratio to host", "images/s", "ratio", "data wait", "decoder", "torch")]
    for name, results in found.items():
        work = report.summary([result.images_per_cpu_s for result in results])
        rate = statistics.median(result.images_per_s for result in results)
        wait = statistics.median(result.data_wait for result in results)
        figures = (f"{work['median']:.1f}", f"{work['min']:.1f}", f"{work['max']:.1f}")
        ratios = [_ratio(kind, results, found["host"]) for kind in ("images_per_cpu_s", "images_per_s")]
        one = results[0]
        rows.append((name, *figures, ratios[0], f"{rate:.1f}", ratios[1], f"{wait:.0%}", one.decoder, one.torch))
    print(report.table(rows))
    if given.json:
        values = {name: [vars(result) for result in results] for name, results in found.items()}
        report.write(given.json, {"machine": report.machine(), "results": values})


if __name__ == "__main__":
    main()
