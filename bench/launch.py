"""From the command to the master's first line: `launcher up` beside a hand-written shell script, on the test bed.

    python -m tests.bed up && python -m bench.launch [--repeat 7] [--json FILE]

Both start the same program in the same image with the same mounts on the same two nodes; the image is there already and
the code is sent along. The program's first line comes when both ranks have met, so it needs both nodes. The two take
turns, and the order changes each time. Also: `launcher --help`, and which modules `up` imports.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bench import report
from bench.environment import installed
from tests.bed import cluster
from tests.bed.bed import Bed
from tests.bed.settings import SITE_PACKAGES_IN_NODE, TRAIN_IMAGE, Settings

PROGRAMS = Path(__file__).parent / "programs"
LAUNCHER = [str(Path(sys.executable).with_name("launcher"))]
FIRST = "met: 2 ranks"
LIMIT = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=7, help="runs of each, after one that is not counted")
    parser.add_argument("--json", type=Path, help="write all values there")
    call = parser.parse_args()
    settings = Settings.from_environment()
    with cluster.locked(settings, "session"), tempfile.TemporaryDirectory(prefix="bench-launch-") as folder:
        result = {
            "machine": report.machine(),
            "first_line": first_line(Bed.attach(settings), Path(folder), call.repeat),
            "help": report.summary([_took(["--help"]) for _ in range(max(5, call.repeat))]),
            "torch_modules_imported_by_up": imported_by_up(Path(folder)),
        }
    result["machine"]["load_after"] = round(os.getloadavg()[0], 2)
    show(result)
    if call.json:
        report.write(call.json, result)
    return 0


def first_line(bed: Bed, folder: Path, repeat: int) -> dict[str, Any]:
    """Seconds of both to the first line, `repeat` times each, taking turns."""
    project = folder / "project"
    project.mkdir()
    shutil.copy(PROGRAMS / "first_line.py", project)
    for node in bed.nodes:
        bed.sweep(node)
    ways: list[tuple[str, Callable[[int], float]]] = [
        ("launcher up", lambda _: _launcher(bed, folder, project)),
        ("script", lambda turn: _script(bed, project, f"bench-{turn}")),
    ]
    seconds: dict[str, list[float]] = {name: [] for name, _ in ways}
    for turn in range(repeat + 1):
        for name, way in ways if turn % 2 else reversed(ways):
            took = way(turn)
            if turn:  # the first fills caches on both sides
                seconds[name].append(took)
                print(f"  {turn}/{repeat}  {name:12} {took:6.2f} s", flush=True)
    ours, theirs = (report.summary(seconds[name]) for name, _ in ways)
    pairs = [a / b for a, b in zip(seconds["launcher up"], seconds["script"], strict=True)]
    return {
        "launcher_up": ours,
        "script": theirs,
        "ratio": round(ours["median"] / theirs["median"], 3),
        "ratio_of_pairs": report.summary(pairs),
    }


def _launcher(bed: Bed, folder: Path, project: Path) -> float:
    job = folder / "job.yaml"
    job.write_text(
        yaml.safe_dump(
            {
                "name": "first-line",
                "image": {"ref": TRAIN_IMAGE},
                "nodes": [node.alias for node in bed.nodes[:2]],
                "run": {"script": "first_line.py"},
                "mounts": {"/opt/venv": "/opt/venv:ro"},
                "env": {"PYTHONPATH": SITE_PACKAGES_IN_NODE, "OMP_NUM_THREADS": "1"},
            }
        )
    )
    environment = {**installed(), "LAUNCHER_SSH_CONFIG": str(bed.ssh_config)}
    took = _until_first_line([*LAUNCHER, "up", str(job)], project, environment)
    subprocess.run([*LAUNCHER, "down"], cwd=project, env=environment, capture_output=True, check=True)
    shutil.rmtree(project / "runs")
    return took


def _script(bed: Bed, project: Path, name: str) -> float:
    nodes = [node.alias for node in bed.nodes[:2]]
    ssh = f"ssh -F {bed.ssh_config}"
    argv = ["sh", str(PROGRAMS / "launch.sh"), name, bed.nodes[0].address, TRAIN_IMAGE, SITE_PACKAGES_IN_NODE, *nodes]
    took = _until_first_line(argv, project, {**installed(), "SSH": ssh})
    for node in nodes:
        bed.ssh(node, f"docker rm -f {name} >/dev/null; rm -rf job")
    return took


def _until_first_line(argv: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> float:
    """Seconds from the call to the line on stdout; then its end is awaited, uncounted. Raises RuntimeError."""
    began, took = time.monotonic(), 0.0
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(argv, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if FIRST in line and not took:
                took = time.monotonic() - began
        code = process.wait(LIMIT)
        if not took or code:
            errors.seek(0)
            raise RuntimeError(f"{argv[0]}: exit {code}, first line {took or 'never'}\n{errors.read()}")
    return took


def _took(arguments: Sequence[str]) -> float:
    began = time.monotonic()
    subprocess.run([*LAUNCHER, *arguments], capture_output=True, check=True)
    return time.monotonic() - began


def imported_by_up(folder: Path) -> list[str]:
    """Modules of torch, torchvision, tensorboard or train that a whole `up` has imported by its end; [] is right."""
    job = folder / "process.yaml"
    job.write_text("name: imports\nruntime: process\nnodes: [local]\nrun: {command: ['true']}\n")
    program = (
        "import sys\nfrom launcher.cli.main import app\n"
        f"try:\n    app(['up', {str(job)!r}])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'torchvision', 'tensorboard', 'train'}\n"
        "print(*[name for name in sys.modules if name.partition('.')[0] in heavy])"
    )
    work = folder / "imports"
    work.mkdir()
    done = subprocess.run([sys.executable, "-c", program], cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run for its imports failed:\n{done.stderr}")
    return done.stdout.splitlines()[-1].split()


def show(result: Mapping[str, Any]) -> None:
    line = result["first_line"]
    print()
    print(
        report.table(
            [
                ["to the first line", "median s", "min", "max", "n"],
                *(
                    [name, *(f"{line[key][k]:.2f}" for k in ("median", "min", "max")), str(len(line[key]["values"]))]
                    for name, key in (("launcher up", "launcher_up"), ("ssh + docker run", "script"))
                ),
                ["ratio", f"{line['ratio']:.2f}", "", "", "target <= 1.00"],
            ]
        )
    )
    print(f"\nlauncher --help: {result['help']['median']:.3f} s (target < 0.3)")
    print(f"torch imported by up: {', '.join(result['torch_modules_imported_by_up']) or 'nothing'}")


if __name__ == "__main__":
    sys.exit(main())
