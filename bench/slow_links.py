"""Two machines on the cable they have: what each way to sum the gradients brings, and what it costs in accuracy.

    python -m bench.slow_links --speed [--nodes 2] [--batch 128] [--json FILE]      # under 12 minutes
    python -m bench.slow_links --accuracy [--tasks digits hard] [--epochs 12] [--seeds 5] [--results FILE] [--json FILE]

Speed: each node of a test bed of its own has one core and sends at most --rate Mb/s (tc tbf inside the node). One node
alone, then each way on all nodes, 30 steps; the forecast of `launcher doctor --bench` for the same job is beside it.
How much a way brings depends on how long the gradients take on the link, as a multiple of the backward pass: a smaller
--batch makes that larger.

Accuracy does not depend on the link: each way trains on two gloo processes of this machine, with the same seeds.
`digits`: the 1,797 handwritten digits. `hard`: the same ones rotated by up to 45 degrees to either side, a ninth of
each image hidden. Each accuracy is appended to --results, and is not measured again where it is there already.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from bench import report
from bench.environment import Caller
from bench.forecast import limited
from launcher.features.bench.forecast import FORWARD
from launcher.features.compare.measured import read
from launcher.records.paths import RunPaths
from launcher.records.store import read_json_lines
from tests.bed import cluster
from tests.bed.bed import Bed
from tests.bed.host import docker
from tests.bed.settings import SITE_PACKAGES_IN_NODE, Settings
from tests.train.runs import digit_tree, run

WAYS = ("plain", "bf16", "powersgd:1", "powersgd:4")
STEPS, LOGGED = 30, 5  # the first interval is not counted
MODEL = {"arch": "resnet18", "image_size": 32, "device": "cpu"}
ENOUGH, TARGET = 1.6, 0.25  # speed with powersgd, of one node; largest error of a forecast
TRAINED = "--arch smallcnn --image-size 16 --val-resize 16 --augment shift --flip 0 --batch-size 16 --lr 0.16"
TASKS = ("digits", "hard")


def speed(nodes: int, batch: int, rate: float, minutes: float) -> dict[str, Any]:
    """Return of each way the seconds of a step, measured and forecast, and its speed of one node's.

    batch: images of a node.
    """
    args = MODEL | {"batch_size": batch, "epochs": 1, "log_every": LOGGED, "headspace": True, "lr": 0.01, "threads": 1}
    env = {"PYTHONPATH": SITE_PACKAGES_IN_NODE, "OMP_NUM_THREADS": "1"}
    more = {"mounts": {"/opt/venv": "/opt/venv:ro"}, "env": env}
    found: dict[str, Any] = {}
    with _pinned(nodes) as bed, Caller.at(bed.ssh_config) as caller, limited(bed, bed.nodes, rate):
        shutil.copytree(Path(__file__).parents[1] / "train", caller.folder / "train")
        names = [node.alias for node in bed.nodes]
        run = {"module": "train", "args": args | {"data": f"synthetic:{STEPS * batch * nodes}"}}
        forecast = _forecast(caller, caller.job("slow", names, run, **more), minutes)
        for way in ("alone", *WAYS):
            own = args | {"gradient_compression": way if ":" in way or way == "bf16" else "none"}
            own["data"] = f"synthetic:{STEPS * batch * (1 if way == 'alone' else nodes)}"
            on = names[:1] if way == "alone" else names
            caller.launcher("up", caller.job("slow", on, {"module": "train", "args": own}, **more))
            [folder] = (caller.folder / "runs").glob("slow-*")
            measured = read(RunPaths(folder), "")
            found[way] = {"step": measured.seconds_per_batch, "images_per_s": measured.images_per_s}
            found[way]["of one"] = measured.images_per_s / found["alone"]["images_per_s"]
            if expected := forecast.get(way):
                found[way] |= {"bytes": expected["bytes"], "forecast": expected["step"]}
                found[way]["error"] = expected["step"] / measured.seconds_per_batch - 1
            *_, end = read_json_lines(RunPaths(folder).metrics)
            if "gradients" in end:  # as the run's last line says
                found[way]["sum"] = end["gradients"]["seconds"]
            caller.down()
            print(_row(way, found[way]), flush=True)
    return found


@contextlib.contextmanager
def _pinned(nodes: int) -> Iterator[Bed]:
    """A new bed whose nodes have one core each; it is removed at the end.

    New, as Docker refuses to take cores from a node in which containers have run (device or resource busy).
    """
    other = Settings.from_environment()
    name = f"{other.name}-slow"
    settings = replace(other, name=name, state=other.state.with_name(name))
    with cluster.locked(settings, "session"):
        try:
            cluster.down(settings)
            cluster.up(settings, nodes)
            bed = Bed.attach(settings)
            for index, node in enumerate(bed.nodes):
                docker("update", "--cpuset-cpus", str(index % report.machine()["cores"]), node.container)
            yield bed
        finally:
            cluster.down(settings)


def _forecast(caller: Caller, job: str, minutes: float) -> dict[str, Any]:
    """Return the ways of doctor's forecast for all nodes, by name, and print how long the gradients take."""
    argv = ("doctor", job, "--bench", "--minutes", str(minutes), "--json")
    done = caller.start(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, errors = done.communicate(timeout=600)
    bench = json.loads(out)["bench"] if out else {}
    if not bench.get("forecast"):
        print(f"no forecast: {bench.get('notes')} {errors[-1000:]}", flush=True)
        return {}
    last = next(each for each in reversed(bench["forecast"]) if not each["without"])
    alone, link = bench["work"]["alone"], last["bandwidth"]
    ratio = last["reduction"] / ((1 - FORWARD) * alone)
    print(
        f"forecast: one node {alone:.3f} s a step, link {link:.3f} Gb/s, gradients {last['reduction']:.2f} s: "
        f"{ratio:.1f} times the backward pass",
        flush=True,
    )
    return {way["name"]: way for way in last["ways"]}


def _row(way: str, found: Mapping[str, Any]) -> str:
    told = f"  {way:11} {found['step']:.3f} s a step  {found['of one']:.2f}x of one"
    if "sum" in found:
        told += f"  sum {found['sum']:.3f} s"
    if "bytes" in found:
        told += f"  {found['bytes'] / 1e6:7.2f} MB  forecast {found['forecast']:.3f} s ({found['error']:+.0%})"
    return told


def accuracy(task: str, epochs: int, seeds: int, results: Path | None) -> dict[str, list[float]]:
    """Return the validation accuracies of each way by seed, percent. results: see --results."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    lines = results.read_text().splitlines() if results and results.exists() else []
    known = [json.loads(line) for line in lines]
    with tempfile.TemporaryDirectory(prefix="slow-links-") as name:
        data = digit_tree(Path(name) / "data", 1437, 360, across=True)
        if task == "hard":
            _make_harder(data)
        for seed, way in itertools.product(range(seeds), WAYS):
            # a seed has the same weights and order of images in each way
            options = f"{TRAINED} --epochs {epochs} --seed {seed} --val-interval 99"
            options += " --workers 1 --threads 1 --device cpu"
            options += f" --gradient-compression {'none' if way == 'plain' else way}"
            key = {"task": task, "options": options}
            top1 = next((each["top1"] for each in known if each | key == each), None)
            if top1 is None:
                began, output = time.monotonic(), Path(name) / f"{way}-{seed}"
                first, _ = run(output, 2, "--data", data, *options.split(), seconds=3600)
                top1 = first.metrics("end")[-1]["top1"]
                shutil.rmtree(output)
                if results:
                    with results.open("a") as file:
                        file.write(json.dumps(key | {"top1": top1}) + "\n")
                took = time.monotonic() - began
                print(f"  {task} seed {seed} {way:11} {top1:.2f} % ({took:.0f} s)", flush=True)
            found[way].append(top1)
    return found


def _make_harder(data: Path) -> None:
    """Rotate each image by up to 45 degrees, and hide a square of a ninth of it; the same ones in each call."""
    chance = random.Random(0)
    for file in sorted(data.rglob("*.jpg")):
        image = Image.open(file).convert("RGB")
        turned, side = image.rotate(chance.uniform(-45, 45), Image.Resampling.BILINEAR), image.width // 3
        x, y = (chance.randrange(image.width - side + 1) for _ in "xy")
        turned.paste((0, 0, 0), (x, y, x + side, y + side))
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
    parser.add_argument("--batch", type=int, default=128, help="images of a node")
    parser.add_argument("--rate", type=float, default=100.0, help="Mb/s that each node sends")
    parser.add_argument("--minutes", type=float, default=2.0, help="time limit of doctor")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--results", type=Path, help="file of the accuracies so far")
    parser.add_argument("--json", type=Path)
    call = parser.parse_args()
    result: dict[str, Any] = {}
    if call.speed:
        result["speed"] = speed(call.nodes, call.batch, call.rate, call.minutes)
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
        result[task] = accuracy(task, call.epochs, call.seeds, call.results)
        print(f"{task}, {call.epochs} epochs, {call.seeds} seeds:\n{compared(result[task])}", flush=True)
    if call.json:
        report.write(
            call.json, report.machine() | {"rate": call.rate, "nodes": call.nodes, "batch": call.batch, **result}
        )


def _met(met: bool) -> str:
    return "met" if met else "NOT MET"


if __name__ == "__main__":
    main()
