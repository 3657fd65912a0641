"""Two machines on the cable they have: what each way to sum the gradients brings, and what it costs in accuracy.

    python -m tests.bed up && python -m bench.slow_links --speed [--nodes 2] [--json FILE]      # under 8 minutes
    python -m bench.slow_links --accuracy [--tasks digits hard] [--seeds 5] [--json FILE]

Speed: each node of the test bed has one core and sends at most --rate Mb/s (tc tbf inside the node). One node alone,
then each way on all nodes, 30 steps; the forecast of `launcher doctor --bench` for the same job is beside it.

Accuracy does not depend on the link: each way trains on two gloo processes of this machine, with the same seeds.
`digits`: the 1,797 handwritten digits. `hard`: the same ones rotated by up to 60 degrees to either side, a quarter of
each image hidden.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from bench import report
from bench.environment import Caller, bed_of
from bench.forecast import limited
from launcher.features.compare.measured import read
from launcher.records.paths import RunPaths
from tests.bed.host import docker
from tests.bed.settings import SITE_PACKAGES_IN_NODE
from tests.train.runs import digit_tree, run

WAYS = ("plain", "bf16", "powersgd:1", "powersgd:4")
STEPS, LOGGED = 30, 5  # the first interval is not counted
BATCH = 24  # of a node
MODEL = {"arch": "resnet18", "image_size": 32, "batch_size": BATCH, "device": "cpu"}
ENOUGH, TARGET = 1.6, 0.25  # speed with powersgd, of one node; largest error of a forecast
TRAINED = "--arch smallcnn --image-size 32 --val-resize 32 --augment shift --flip 0 --batch-size 16 --lr 0.16"
EPOCHS = {"digits": 8, "hard": 12}


def speed(nodes: int, rate: float, minutes: float) -> dict[str, Any]:
    """Return of each way the seconds of a step, measured and forecast, and its speed of one node's."""
    args = MODEL | {"data": f"synthetic:{STEPS * BATCH}", "epochs": 1, "log_every": LOGGED, "headspace": True}
    args |= {"lr": 0.01, "threads": 1}
    env = {"PYTHONPATH": SITE_PACKAGES_IN_NODE, "OMP_NUM_THREADS": "1"}
    more = {"mounts": {"/opt/venv": "/opt/venv:ro"}, "env": env}
    found: dict[str, Any] = {}
    with bed_of(nodes) as bed, Caller.at(bed.ssh_config) as caller, limited(bed, bed.nodes[:nodes], rate):
        shutil.copytree(Path(__file__).parents[1] / "train", caller.folder / "train")
        names = [node.alias for node in bed.nodes[:nodes]]
        for index, node in enumerate(bed.nodes[:nodes]):
            docker("update", "--cpuset-cpus", str(index % (report.machine()["cores"])), node.container)
        job = caller.job("slow", names, {"module": "train", "args": args}, **more)
        forecast = _forecast(caller, job, minutes)
        for way in ("alone", *WAYS):
            own = args | {"gradient_compression": way if ":" in way or way == "bf16" else "none"}
            own["data"] = f"synthetic:{STEPS * BATCH * (1 if way == 'alone' else nodes)}"
            caller.job("slow", names[:1] if way == "alone" else names, {"module": "train", "args": own}, **more)
            caller.launcher("up", job)
            [folder] = (caller.folder / "runs").glob("slow-*")
            measured = read(RunPaths(folder), "")
            found[way] = {"step": measured.seconds_per_batch, "images_per_s": measured.images_per_s}
            found[way]["of one"] = measured.images_per_s / found["alone"]["images_per_s"]
            if expected := forecast.get(way):
                found[way] |= {"bytes": expected["bytes"], "forecast": expected["step"]}
                found[way]["error"] = expected["step"] / measured.seconds_per_batch - 1
            caller.down()
            print(_row(way, found[way]), flush=True)
    return found


def _forecast(caller: Caller, job: str, minutes: float) -> dict[str, Any]:
    """Return the ways of doctor's forecast for all nodes, by name."""
    argv = ("doctor", job, "--bench", "--minutes", str(minutes), "--json")
    done = caller.start(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, errors = done.communicate(timeout=600)
    bench = json.loads(out)["bench"] if out else {}
    if not bench.get("forecast"):
        print(f"no forecast: {bench.get('notes')} {errors[-1000:]}", flush=True)
        return {}
    last = bench["forecast"][-1]
    print(f"forecast: one node {bench['work']['alone']:.3f} s a step, link {last['bandwidth']:.3f} Gb/s", flush=True)
    return {way["name"]: way for way in last["ways"]}


def _row(way: str, found: Mapping[str, Any]) -> str:
    told = f"  {way:11} {found['step']:.3f} s a step  {found['of one']:.2f}x of one"
    if "bytes" not in found:
        return told
    return f"{told}  {found['bytes'] / 1e6:7.2f} MB  forecast {found['forecast']:.3f} s ({found['error']:+.0%})"


def accuracy(task: str, seeds: int) -> dict[str, list[float]]:
    """Return the validation accuracies of each way by seed, percent."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="slow-links-") as name:
        data = digit_tree(Path(name) / "data", 1437, 360, across=True)
        if task == "hard":
            _make_harder(data)
        for seed in range(seeds):
            for way in WAYS:  # a seed has the same weights and order of images in each way
                began, output = time.monotonic(), Path(name) / f"{way}-{seed}"
                options = f"{TRAINED} --epochs {EPOCHS[task]} --seed {seed} --val-interval 99"
                options += " --workers 1 --threads 1 --device cpu"
                options += f" --gradient-compression {'none' if way == 'plain' else way}"
                first, _ = run(output, 2, "--data", data, *options.split(), seconds=3600)
                found[way].append(first.metrics("end")[-1]["top1"])
                shutil.rmtree(output)
                took = time.monotonic() - began
                print(f"  {task} seed {seed} {way:11} {found[way][-1]:.2f} % ({took:.0f} s)", flush=True)
    return found


def _make_harder(data: Path) -> None:
    """Rotate each image by up to 60 degrees, and hide a square of a quarter of it; the same ones in each call."""
    chance = random.Random(0)
    for file in sorted(data.rglob("*.jpg")):
        image = Image.open(file).convert("RGB")
        turned, half = image.rotate(chance.uniform(-60, 60), Image.Resampling.BILINEAR), image.width // 2
        turned.paste((0, 0, 0), (x := chance.randrange(half + 1), y := chance.randrange(half + 1), x + half, y + half))
        turned.save(file, quality=95)


def compared(values: Mapping[str, Sequence[float]]) -> str:
    """Return the means with their standard errors, and which are within one standard error of plain DDP's mean."""

    def error(found: Sequence[float]) -> float:
        return statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else 0.0

    plain, lines = values["plain"], []
    for way, found in values.items():
        mean, apart = statistics.mean(found), statistics.mean(found) - statistics.mean(plain)
        within = "" if way == "plain" else f"  {apart:+.2f}, {'within' if abs(apart) <= error(plain) else 'NOT within'}"
        lines.append(f"  {way:11} {mean:.2f} +- {error(found):.2f} %{within}{' one standard error' * (way != 'plain')}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate", type=float, default=100.0, help="Mb/s that each node sends")
    parser.add_argument("--minutes", type=float, default=1.5, help="time limit of doctor")
    parser.add_argument("--tasks", nargs="+", choices=[*EPOCHS], default=[*EPOCHS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    call = parser.parse_args()
    result: dict[str, Any] = {}
    if call.speed:
        result["speed"] = speed(call.nodes, call.rate, call.minutes)
        of_one = {way: each["of one"] for way, each in result["speed"].items()}
        best = max(of_one["powersgd:1"], of_one["powersgd:4"])
        met = of_one["plain"] < 1 <= ENOUGH <= best
        print(
            f"plain {of_one['plain']:.2f}x, powersgd {best:.2f}x of one node; target < 1 and >= {ENOUGH}: {_met(met)}"
        )
        errors = [abs(each["error"]) for each in result["speed"].values() if "error" in each]
        right = bool(errors) and max(errors) <= TARGET
        print(f"largest error of a forecast {max(errors, default=math.nan):.0%}, target {TARGET:.0%}: {_met(right)}")
    for task in call.tasks if call.accuracy else ():
        result[task] = accuracy(task, call.seeds)
        print(f"{task}, {call.seeds} seeds:\n{compared(result[task])}", flush=True)
    if call.json:
        report.write(call.json, report.machine() | {"rate": call.rate, "nodes": call.nodes, **result})


def _met(met: bool) -> str:
    return "met" if met else "NOT MET"


if __name__ == "__main__":
    main()
