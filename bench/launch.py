"""Time to running containers and to the first line of output: `launcher up` and a hand-written shell script.

    python -m tests.bed up -n 8 && python -m bench.launch [--far] [--nodes 2 8] [--repeat 15] [--json FILE]

Both start the same program in the same image with the same mounts on the same nodes of the test bed. The nodes already
have the image; the code is sent. The script (bench/programs/launch.sh) starts one node after another. Two times are
measured, in separate runs:

- until the last container runs: `launcher up -d` returns; the script's last `docker run -d` has returned. The program
  is `sleep`, because torch in the first containers would load the CPUs that all nodes of the bed share.
- until the first line: the program prints it after all ranks have joined, so it needs every node.

The two alternate, and the order changes each time; the ratio is the median over pairs. Also measured: commands that
should answer at once (of a run of plain processes that has ended), and which modules `up` imports.

With --far, the nodes have an ssh round trip of 50 ms (tests/bed/delay.py), and the baseline is `ssh NODE docker run` to
all nodes concurrently, which sends no code, verifies no image and collects nothing. With one node and with all:

- start: `launcher up -d` of a job that sleeps; baseline: `docker run -d` of the same program.
- a whole run: an attached `launcher up` of a job that does nothing (`true`); baseline: `docker run --rm`.
- down: `launcher down` of the job that sleeps; baseline: `docker rm -f`.
- the end of a run: from the end of its last container, as Docker reports it, to the exit of an attached `up`. The nodes
  share this machine's clock.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bench import report
from bench.environment import LAUNCHER, LIMIT, Caller, Cost, bed_of, ssh_to_all
from tests.bed.bed import Bed
from tests.bed.delay import delayed
from tests.bed.settings import SITE_PACKAGES_IN_NODE, TRAIN_IMAGE

PROGRAMS = Path(__file__).parent / "programs"
RUNNING, FIRST_LINE = "last container runs", "first line"
TARGETS = {(RUNNING, 2): 1.6, (RUNNING, 8): 0.8, (FIRST_LINE, 2): 1.08}  # ours / the script's
AT_ONCE = {"--help": 0.3, "up --help": 0.3, "status": 0.35, "runs": 0.35, "logs --no-follow": 0.35}  # seconds
SLEEP = "sleep 600"
DELAY = 0.025  # seconds each way, with --far
START, WHOLE, DOWN, END = "start", "whole run", "down", "end of a run"
START_TARGET = 2.2  # launcher / ssh, with all nodes
WHOLE_FACTOR, WHOLE_EXTRA = 1.3, 1.0  # allowed growth from one node to all: factor on ssh's growth, plus seconds
DOWN_TARGET = 1.0  # seconds, growth from one node to all
END_TARGET = 0.7  # seconds, one node
SHORT = ["sleep", "4"]  # long enough for the launcher to follow the run before it ends
CONTAINER = "bench-far"
OPTIONS = f"--name {CONTAINER} --network host --ipc host --init"
JOB_KEYS: dict[str, Any] = {
    "mounts": {"/opt/venv": "/opt/venv:ro"},
    "env": {"PYTHONPATH": SITE_PACKAGES_IN_NODE, "OMP_NUM_THREADS": "1"},
}


Values = dict[tuple[str, str, int], list[float]]  # (what, method, nodes) -> seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.launch", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--repeat", type=int, default=15, help="pairs of each, after one warm-up")
    parser.add_argument("--json", type=Path, help="write all values to this file")
    parser.add_argument("--far", action="store_true", help="distant nodes, one and the most of --nodes")
    call = parser.parse_args()
    if call.far:
        return far(max(call.nodes), call.repeat, call.json)
    result: dict[str, Any] = {"machine": report.machine(), "results": []}
    with bed_of(max(call.nodes)) as bed, Caller.at(bed.ssh_config) as caller:
        shutil.copy(PROGRAMS / "first_line.py", caller.folder)
        for nodes in call.nodes:
            pair = Pair(bed, caller, nodes)
            result["results"] += [
                measure(RUNNING, nodes, pair.running, pair.script_running, call.repeat),
                measure(FIRST_LINE, nodes, pair.first_line, pair.script_first_line, call.repeat),
            ]
    result["commands"] = commands(max(5, call.repeat))
    result["torch_modules_imported_by_up"] = imported_by_up()
    result["machine"]["load_after"] = round(os.getloadavg()[0], 2)
    show(result)
    if call.json:
        report.write(call.json, result)
    return 0


def measure(
    what: str, nodes: int, ours: Callable[[], float], theirs: Callable[[], float], repeat: int
) -> dict[str, Any]:
    """Seconds of both, alternating."""
    methods = [("launcher", ours), ("script", theirs)]
    seconds: dict[str, list[float]] = {name: [] for name, _ in methods}
    for turn in range(repeat + 1):
        for name, method in methods if turn % 2 else reversed(methods):
            took = method()
            if turn:  # the first fills caches on both sides
                seconds[name].append(took)
                print(f"  {turn}/{repeat}  {nodes} nodes, {what}: {name:8} {took:6.2f} s", flush=True)
    pairs = [a / b for a, b in zip(seconds["launcher"], seconds["script"], strict=True)]
    return {
        "what": what,
        "nodes": nodes,
        **{name: report.summary(values) for name, values in seconds.items()},
        "ratio": report.summary(pairs),
        "target": TARGETS.get((what, nodes)),
    }


class Pair:
    """Launcher and script on `nodes` nodes. Each call cleans up after itself; that is not timed."""

    def __init__(self, bed: Bed, caller: Caller, nodes: int) -> None:
        self._bed = bed
        self._caller = caller
        self._nodes = bed.nodes[:nodes]
        self._first = f"joined: {nodes} ranks"
        self._scripts = 0

    def running(self) -> float:
        took = self._caller.launcher("up", "-d", self._job("bench-sleep", {"command": SLEEP.split()})).wall
        self._caller.down()
        return took

    def first_line(self) -> float:
        job = self._job("bench-first-line", {"script": "first_line.py"})
        took = self._until_first_line([LAUNCHER, "up", job], self._caller.environment)
        self._caller.down()
        return took

    def script_running(self) -> float:
        argv, environment = self._script(PROGRAM=SLEEP, DETACH="1")
        began = time.monotonic()
        subprocess.run(argv, cwd=self._caller.folder, env=environment, check=True, timeout=LIMIT)
        took = time.monotonic() - began
        self._remove()
        return took

    def script_first_line(self) -> float:
        took = self._until_first_line(*self._script())
        self._remove()
        return took

    def _job(self, name: str, run: Mapping[str, Any]) -> str:
        return self._caller.job(name, [node.alias for node in self._nodes], run, **JOB_KEYS)

    def _script(self, **more: str) -> tuple[list[str], dict[str, str]]:
        self._scripts += 1
        given = [self._name, self._nodes[0].address, TRAIN_IMAGE, SITE_PACKAGES_IN_NODE]
        argv = ["sh", str(PROGRAMS / "launch.sh"), *given, *(node.alias for node in self._nodes)]
        return argv, {**self._caller.environment, "SSH": f"ssh -F {self._bed.ssh_config}", **more}

    @property
    def _name(self) -> str:
        return f"bench-{len(self._nodes)}-{self._scripts}"

    def _remove(self) -> None:
        for node in self._nodes:
            self._bed.ssh(node.alias, f"docker rm -f {self._name} >/dev/null; rm -rf job")

    def _until_first_line(self, argv: Sequence[str], environment: Mapping[str, str]) -> float:
        """Seconds from the call to the line on stdout; then waits for the program's end. Raises RuntimeError."""
        began, took = time.monotonic(), 0.0
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                argv, cwd=self._caller.folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            assert process.stdout is not None
            for line in process.stdout:
                if self._first in line and not took:
                    took = time.monotonic() - began
            code = process.wait(LIMIT)
            if not took or code:
                errors.seek(0)
                raise RuntimeError(f"{argv[0]}: exit {code}, first line {took or 'never'}\n{errors.read()}")
        return took


def commands(repeat: int) -> dict[str, Any]:
    """Seconds of wall and of processor time of each command, in turn."""
    costs: dict[str, list[Cost]] = {command: [] for command in AT_ONCE}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Caller.at(Path(folder, "no-ssh-config")) as caller:
        caller.ssh_config.touch()
        job = {"name": "bench-commands", "runtime": "process", "nodes": ["local"], "run": {"command": ["true"]}}
        (caller.folder / "job.yaml").write_text(yaml.safe_dump(job))
        caller.launcher("up", "job.yaml")
        for turn in range(repeat + 1):
            for command, found in costs.items():
                cost = caller.launcher(*command.split())
                if turn:  # the first fills caches
                    found.append(cost)
        caller.down()
    return {
        command: {"wall": report.summary([c.wall for c in found]), "cpu": report.summary([c.processor for c in found])}
        for command, found in costs.items()
    }


def imported_by_up() -> list[str]:
    """Modules of torch, torchvision, tensorboard or train that a complete `up` imports; should be empty."""
    program = (
        "import sys\nfrom launcher.cli.main import app\n"
        "try:\n    app(['up', 'process.yaml'])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'torchvision', 'tensorboard', 'train'}\n"
        "print(*[name for name in sys.modules if name.partition('.')[0] in heavy])"
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        job = Path(folder) / "process.yaml"
        job.write_text("name: imports\nruntime: process\nnodes: [local]\nrun: {command: ['true']}\n")
        done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run that lists imports failed:\n{done.stderr}")
    return done.stdout.splitlines()[-1].split()


def show(result: Mapping[str, Any]) -> None:
    rows = [("nodes", "until", "launcher s", "script s", "ratio", "min", "max", "n", "target")]
    for found in result["results"]:
        ratio = found["ratio"]
        rows.append(
            (
                str(found["nodes"]),
                found["what"],
                f"{found['launcher']['median']:.2f}",
                f"{found['script']['median']:.2f}",
                *(f"{ratio[key]:.2f}" for key in ("median", "min", "max")),
                str(len(ratio["values"])),
                "" if found["target"] is None else report.compared(ratio["median"], found["target"]),
            )
        )
    print()
    print(report.table(rows))
    print()
    for command, found in result["commands"].items():
        wall = report.compared(found["wall"]["median"], AT_ONCE[command], "s")
        print(f"launcher {command}: {wall}; processor time {found['cpu']['median']:.2f} s")
    print(f"torch imported by up: {', '.join(result['torch_modules_imported_by_up']) or 'nothing'}")


def far(most: int, repeat: int, file: Path | None) -> int:
    machine = report.machine()
    values: Values = {}
    with bed_of(most) as bed, delayed(bed, DELAY) as config, Caller.at(config) as caller:
        distant = DistantNodes(bed, caller)
        for turn in range(repeat + 1):
            for nodes in (1, most):
                for who, seconds in distant.turn(nodes) if turn % 2 else reversed(distant.turn(nodes)):
                    for what, took in seconds().items():
                        if turn:  # the first fills caches on both sides
                            values.setdefault((what, who, nodes), []).append(took)
                            print(f"  {turn}/{repeat}  {nodes} nodes, {what}: {who:8} {took:6.2f} s", flush=True)
    machine["load_after"] = round(os.getloadavg()[0], 2)
    show_far(values, most)
    if file:
        results = [{"what": w, "who": n, "nodes": c, **report.summary(v)} for (w, n, c), v in values.items()]
        report.write(file, {"machine": machine, "delay_each_way_s": DELAY, "results": results})
    return 0


class DistantNodes:
    """The launcher and ssh on distant nodes. Each call cleans up after itself; that is not timed."""

    def __init__(self, bed: Bed, caller: Caller) -> None:
        self._nodes = [node.alias for node in bed.nodes]
        self._caller = caller

    def turn(self, nodes: int) -> list[tuple[str, Any]]:
        return [
            ("launcher", lambda: self.launcher(self._nodes[:nodes])),
            ("ssh", lambda: self.ssh(self._nodes[:nodes])),
        ]

    def launcher(self, nodes: Sequence[str]) -> dict[str, float]:
        call, seconds = self._caller.launcher, {}
        seconds[START] = call("up", "-d", self._caller.job("bench-sleep", nodes, {"command": SLEEP.split()})).wall
        seconds[DOWN] = call("down").wall
        seconds[WHOLE] = call("up", self._caller.job("bench-true", nodes, {"command": ["true"]})).wall
        self._caller.down()
        call("up", self._caller.job("bench-short", nodes, {"command": SHORT}))
        seconds[END] = self._caller.seconds_since_end()
        self._caller.down()
        return seconds

    def ssh(self, nodes: Sequence[str]) -> dict[str, float]:
        run = f"docker run {OPTIONS}"
        return {
            START: self._on_all(nodes, f"{run} -d {TRAIN_IMAGE} {SLEEP}"),
            DOWN: self._on_all(nodes, f"docker rm -f {CONTAINER}"),
            WHOLE: self._on_all(nodes, f"{run} --rm {TRAIN_IMAGE} true"),
        }

    def _on_all(self, nodes: Sequence[str], command: str) -> float:
        return ssh_to_all(self._caller.ssh_config, nodes, command).wall


def show_far(values: Values, most: int) -> None:
    rows = [("", *(f"{who}, {nodes} node{'s' * (nodes > 1)}" for who in ("launcher", "ssh") for nodes in (1, most)))]
    for what in (START, WHOLE, DOWN, END):
        cells = [values.get((what, who, nodes)) for who in ("launcher", "ssh") for nodes in (1, most)]
        rows.append((what, *("" if cell is None else _cell(cell) for cell in cells)))
    print()
    print(report.table(rows))

    def median(what: str, who: str, nodes: int) -> float:
        return statistics.median(values[what, who, nodes])

    def growth(what: str, who: str) -> float:
        return median(what, who, most) - median(what, who, 1)

    pairs = zip(values[START, "launcher", most], values[START, "ssh", most], strict=True)
    start = statistics.median(ours / theirs for ours, theirs in pairs)
    allowed = WHOLE_FACTOR * growth(WHOLE, "ssh") + WHOLE_EXTRA
    print()
    print(f"start with {most} nodes, ratio to concurrent ssh: {report.compared(start, START_TARGET)}")
    whole = report.compared(growth(WHOLE, "launcher"), allowed, "s")
    formula = f"{WHOLE_FACTOR:g} x {growth(WHOLE, 'ssh'):.2f} s of ssh + {WHOLE_EXTRA:g} s"
    print(f"a whole run grows from 1 to {most} nodes by {whole} ({formula})")
    print(f"down grows from 1 to {most} nodes by {report.compared(growth(DOWN, 'launcher'), DOWN_TARGET, 's')}")
    print(f"the end of a run on one node: {report.compared(median(END, 'launcher', 1), END_TARGET, 's')}")


def _cell(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    sys.exit(main())
